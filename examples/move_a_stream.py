"""Start a stream with the OpenAI SDK and move it to another instance while it runs. Needs a gateway (`make up`) and `pip install openai`.

python examples/move_a_stream.py [http://127.0.0.1:8000]
"""

import json
import sys
import threading
import urllib.request

from openai import OpenAI

GATEWAY = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
MOVE_AFTER_CHUNKS = 40


def move(request: str) -> None:
    """Ask the gateway to move the request to its best other instance; answered when it is over."""
    order = urllib.request.Request(
        f"{GATEWAY}/admin/migrations", json.dumps({"request": request}).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(order) as response:
        outcome = json.load(response)
    print(f"\n--- {outcome['outcome']}: {outcome['source']} -> {outcome['destination']}, {outcome['stages']} stages, ", end="")
    print(f"{outcome['bytes'] / 1e6:.1f} MB of KV cache, {outcome['downtime_ms']:.0f} ms between two tokens ---")


client = OpenAI(base_url=f"{GATEWAY}/v1", api_key="unused")
answer = client.chat.completions.with_raw_response.create(
    model=client.models.list().data[0].id,
    messages=[{"role": "user", "content": "Explain why the sky is blue."}],
    max_tokens=160,
    stream=True,
)
mover = threading.Thread(target=move, args=(answer.headers["x-request-id"],))
for number, chunk in enumerate(answer.parse()):
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    if number == MOVE_AFTER_CHUNKS:
        mover.start()
mover.join()
print()
