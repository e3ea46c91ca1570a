"""Files and batches over HTTP, and requests of batches on behalf of the batch service."""
