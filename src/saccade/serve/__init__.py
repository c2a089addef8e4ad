"""An OpenAI-compatible server. The life of one request:

1. `app` checks key, size and draining, and `wire` the JSON: what is unknown is refused by name.
2. `desk` gives it a place, or says when to come again (429).
3. `reading` loads its media (`media.fetch`), decodes them in a guarded process (`media.guard`) and
   lets the processor make inputs of the conversation, all in one of `threads`.
4. `desk` hands it to its one engine thread, where `engine.scheduler` works on all at once;
   rounds come back as they happen, and a client that hangs up takes its rows with it.
5. `answer` turns rounds into text, chunks, log-probabilities and the numbers of speculation.
"""
