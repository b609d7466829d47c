"""Passive backends: plain OpenAI servers, watched from outside and published like any other instance."""
