"""A client of Starling: channels with token, deadline and retries; paging, catching up, watching; errors with reasons.

    with Starling(tweet="127.0.0.1:7001", timeline="127.0.0.1:7003", token=token) as starling:
        posted = starling.post("Hello")
        for item in starling.home(read_your_write_token=posted.read_your_write_token):
            print(item.author.handle, item.tweet.text)

`starling.tweets`, `starling.timelines` and `starling.graph` are the typed stubs, which are under `starling.<area>.v1`.
"""

from starling_client.channels import connect, connect_aio
from starling_client.client import Starling
from starling_client.errors import Explanation, explain
from starling_client.paging import async_pages, pages

__all__ = ["Explanation", "Starling", "async_pages", "connect", "connect_aio", "explain", "pages"]
