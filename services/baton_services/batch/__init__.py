"""Asynchronous jobs on JetStream, and OpenAI's batches on the same queue."""
