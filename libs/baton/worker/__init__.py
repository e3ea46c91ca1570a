"""What prefill and decode workers share: the engine loop, hand-off, token streams, KV events."""
