"""Reads a home timeline with the Python stubs: python docs/first_read.py HOST:PORT TOKEN."""

import sys

import grpc

from starling.timeline.v1 import timeline_pb2, timeline_pb2_grpc


def main(target: str, bearer: str) -> None:
    """Print the whole home timeline, page by page."""
    channel = grpc.insecure_channel(target)
    timeline = timeline_pb2_grpc.TimelineServiceStub(channel)
    metadata = (("authorization", f"Bearer {bearer}"),)
    token = ""
    while True:
        request = timeline_pb2.ListHomeTimelineRequest(page_size=20, page_token=token)
        page = timeline.ListHomeTimeline(request, metadata=metadata, timeout=5)
        for item in page.items:
            print(f"@{item.author.handle}: {item.tweet.text}")
        token = page.next_page_token
        if not token:
            break


if __name__ == "__main__":
    main(*sys.argv[1:3])
