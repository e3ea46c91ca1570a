"""Text to tokens and back, as a model's own files have it. No torch. Read in this order:

`tokenizer`        one vocabulary: encode with and without special tokens, tokens' bytes, what ends an answer
`gguf_tokenizers`  built from GGUF metadata: byte-level BPE (`pretokenizers`) and SentencePiece (`spm`)
`hf_tokenizer`     built from a folder's `tokenizer.json`
`templates`        conversations to token ids; `marks` keep users' text plain, `sandbox` bounds the template
`detokenizer`      token ids to text as they come
`stops`            stop strings in streamed text
`model_files`      all of it for one model, by name or path
`mock`             the mock engine's vocabulary
"""
