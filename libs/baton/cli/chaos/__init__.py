"""Breaking a cluster on purpose while load runs, and checking that nobody notices more than a pause."""
