"""What the KV store costs and what it keeps."""
