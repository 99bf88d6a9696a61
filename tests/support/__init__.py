"""What tests and benchmarks share: real servers as processes, and a client of the websocket protocol."""
