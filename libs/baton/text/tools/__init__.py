"""Tool calls in text: how model families write them, read back as they come. No torch.

`events`    what a reader of calls finds: text, the begin of a call, a piece of its arguments
`scanner`   one call as a JSON object, character by character
`tagged`    calls as JSON behind a tag, or bare: Hermes and Qwen, Llama 3, Mistral, generic
`pythonic`  calls as Python writes them
`grammars`  the same as grammars, so that even a small model writes a valid call
`dialects`  which family a model is of, by its template
`render`    tools and calls in a prompt whose template knows nothing of them
"""
