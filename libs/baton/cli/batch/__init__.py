"""`baton batch`: jobs from the command line, over the HTTP API."""
