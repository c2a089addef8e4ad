"""An OpenAI-compatible server. The life of one request:

1. `routes` checks the API key, the size of the body and whether the server is draining.
   `request_bodies` reads the body, and `request_schema` checks its JSON: a field that it does not
   know is refused by name. `request_reader` checks what this server allows, such as the number of
   tokens.
2. `completion_handler` reserves slots in the `queue` for the answers. Where none is free the client
   is refused with 429 and the seconds after which to try again.
3. `request_reader` loads the media (`media.fetch`), decodes them in a guarded process
   (`media.decoder_pool`) and lets the processor make inputs of the conversation, all of it in one
   of `service`'s threads. Where the client asks for a format, `formats.grammar` says which tokens
   may follow, and `formats.reasoning` lets the model reason before it.
4. The `queue` hands the request to its one engine thread, where `engine.scheduler` works on all
   requests at once. Rounds come back as they happen, with their log-probabilities, and a client
   that disconnects frees its rows.
5. `detokenizer` and `response_fields` turn rounds into text and the statistics of speculation.
   `formats.chat_forms` gives them OpenAI's shape, including tool calls (`formats.tool_calls`).

What one request read (media, vision, prompts) is kept for later ones in `model.prefix_cache`.

A server is a `service`, which is made of `server_settings`. `api_errors` has the form of an error
response.
"""
