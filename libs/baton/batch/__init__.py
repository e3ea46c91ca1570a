"""Batch jobs and files, as they lie in JetStream: what gateways, batch services and commands share.

`names`    subjects, streams, ids       `records`  jobs and files and their states
`state`    the key-value side           `files`    contents, in the object store
`lines`    a job's input, checked       `order`    which requests share a prefix
`results`  what a request came to
"""
