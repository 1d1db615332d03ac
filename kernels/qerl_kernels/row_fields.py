"""The fields of a row of a decoding step, and their places in its state (`rows.py`)."""

FIELDS = (
    "token",  # the latest one, whose key is not yet stored
    "length",  # of the keys that are stored, which is the position of the token
    "drawn",  # tokens of the completion, the latest included
    "done",  # 1: has no more to draw
    "limit",  # of tokens
    "stops",  # 1: a stop token ends the completion
    "place",  # row of the results
    "prefix",  # keys that are read together with other rows, in whole pages
    "key",  # of the random numbers
)
TOKEN, LENGTH, DRAWN, DONE, LIMIT, STOPS, PLACE, PREFIX, KEY = range(len(FIELDS))
