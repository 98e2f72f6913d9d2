"""What the launcher itself is told; everything else named STARLING_* goes on to the services."""

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from launcher import data_folder

PORT_BASE_OFFSET_EDGE = 4
PORT_BASE_OFFSET_VALKEY = 9
PORT_BASE_OFFSET_MORE_WORKERS = 10
FANOUT_WORKERS_MAX = 16


class LauncherConfig(BaseSettings):
    """From STARLING_DATA, STARLING_PORT_BASE, STARLING_FANOUT_WORKERS, STARLING_VALKEY_URL."""

    model_config = SettingsConfigDict(env_prefix="STARLING_", frozen=True)

    data: str = data_folder.DEFAULT
    port_base: int = Field(0, ge=0, le=65_000)
    """graph_svc serves here, tweet_svc on the next port, fanout_svc +2, timeline_svc +3, the edge +4, Valkey +9,
    further workers from +10; 0: free ports, and 8080 for the edge if that is one."""
    fanout_workers: int = Field(1, ge=1, le=FANOUT_WORKERS_MAX)
    valkey_url: str = ""
    """A Valkey, or a cluster, that runs already; empty: one is started here, and its data are kept here."""
