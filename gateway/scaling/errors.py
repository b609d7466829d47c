"""The errors of scaling, part of the gateway's tree.

GatewayError
├── NotFound
│   ├── InstanceNotFound    404  no such instance
│   └── OperationNotFound   404  no such operation, or it was forgotten
├── OrderConflict           409  it cannot be done as things are; `code` says why
├── LauncherFailed          502  the launcher cannot be reached, or did not do it
└── StoreDown               503  orders need the shared store
"""

from gateway.errors import GatewayError, NotFound


class InstanceNotFound(NotFound):
    """No instance of that name."""

    code = "instance_not_found"


class OperationNotFound(NotFound):
    """No operation of that id."""

    code = "operation_not_found"


class OrderConflict(GatewayError):
    """The order makes sense, and cannot be carried out as things are."""

    status, type = 409, "invalid_request_error"

    def __init__(self, message: str, code: str, *, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.code = code


class LauncherFailed(GatewayError):
    """The launcher cannot be reached, or did not do it."""

    status, code = 502, "launcher_failed"


class StoreDown(GatewayError):
    """The shared store does not answer, and an order that nobody keeps would be lost."""

    status, type, code = 503, "service_unavailable", "store_unavailable"
    retry_after_s = 1
