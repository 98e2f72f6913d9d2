"""What Schemathesis is told of formats that the document only names: values that are valid by the protos' words."""

import os
import string

import schemathesis
from hypothesis import strategies as st

_PLAIN = string.ascii_letters + string.digits + " ,!'éüßñ"
_USER_IDS = os.environ["STARLING_TEST_USER_IDS"].split(",")

# 1 to 280 by twitter-text's weights: these characters weigh 1 each, and none of them makes a link.
schemathesis.openapi.format(
    "tweet-text", st.text(_PLAIN, min_size=1, max_size=280).filter(lambda text: bool(text.strip()))
)
schemathesis.openapi.format("display-name", st.text(_PLAIN, max_size=50))
# Only the API makes cursors and tags; the empty cursor is the first page's, and `*` any tag.
schemathesis.openapi.format("cursor", st.just(""))
schemathesis.openapi.format("entity-tag", st.just("*"))
schemathesis.openapi.format("idempotency-key", st.uuids().map(str))
schemathesis.openapi.format("uint64", st.sampled_from(_USER_IDS) | st.integers(1, 2**62).map(str))
