"""Twelve-factor configuration: typed, from STARLING_* variables; a wrong one fails at boot, named."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, NoReturn, TypeVar

from pydantic import Field, SecretStr, ValidationError, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from mesh.valkey_cluster import SCHEME

ENV_PREFIX = "STARLING_"
_SECRET_BYTES_MIN = 32

T = TypeVar("T", bound=BaseSettings)


class Config(BaseSettings):
    """What every service is told. Seconds, bytes and counts say so in their names."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, frozen=True)

    listen: str = "127.0.0.1:0"
    """Address to serve on; port 0: any free one, printed at start."""
    address_file: str = ""
    """Where to write the address served on, for whoever started this process; empty: nowhere."""
    valkey_url: str = Field(
        "redis://127.0.0.1:6379/0",
        pattern=r"^(rediss?://[^/\s]+(:\d+)?(/\d+)?|unix:///\S+|valkey-cluster://(\S+@)?[\w.-]+:\d+(,[\w.-]+:\d+)*)$",
    )
    """One server, or some nodes of a cluster, which holds lists and caches only: then `eventlog_url` is needed."""
    eventlog_url: str = Field(
        "", validate_default=True, pattern=r"^(kafka://[\w.-]+:\d+(,[\w.-]+:\d+)*(\?replication=[1-9])?)?$"
    )
    """The log on Kafka, `kafka://host:port,…?replication=N`: N copies of each topic that is made here (3 unless it is
    said). Empty: the log is Valkey's."""
    key_prefix: str = Field("", pattern=r"^[A-Za-z0-9_.:-]{0,64}$")
    auth_secret: SecretStr
    """HMAC key of principals' tokens, at least 32 bytes."""
    page_token_keys: Annotated[list[SecretStr], NoDecode] = Field(min_length=1)
    """HMAC keys of page tokens, comma-separated, the newest first; all of them verify."""
    max_connection_age_seconds: float = Field(30.0, gt=0)
    """Clients reconnect so often, and find new servers."""
    max_message_bytes: int = Field(4 << 20, ge=16 << 10)
    drain_seconds: float = Field(0.5, ge=0)
    """Between NOT_SERVING and refusing: long enough for clients to notice."""
    grace_seconds: float = Field(10.0, gt=0)
    """How long calls in flight may take to finish at shutdown."""
    concurrent_calls_max: int = Field(1_000, ge=1)
    """Calls in flight beyond this are refused with RESOURCE_EXHAUSTED."""
    reflection: bool = True
    log_level: str = Field("info", pattern="^(debug|info|warning|error)$")
    log_format: Literal["text", "json"] = "text"
    log_requests: bool = False
    """One line per call: caller, method, status, milliseconds, trace."""
    metrics_listen: str = Field("", pattern=r"^((\[[0-9a-fA-F:.]+\]|[^\s,:/\[\]]*):\d{1,5})?$")
    """`host:port` of Prometheus's /metrics; empty: none."""
    otlp_endpoint: str = Field("", pattern=r"^(https?://\S+)?$")
    """Where spans are sent, over gRPC (`http://host:4317`); empty: nowhere, and nothing of OpenTelemetry is loaded."""
    trace_ratio: float = Field(0.01, ge=0, le=1)
    """Share of traces that are recorded; those whose caller wants it are, too."""

    @field_validator("eventlog_url")
    @classmethod
    def _wanted_with_a_cluster(cls, value: str, info: ValidationInfo) -> str:
        if not value and info.data.get("valkey_url", "").startswith(SCHEME):
            raise ValueError("needed where STARLING_VALKEY_URL is a cluster, which can't keep the log")
        return value

    @field_validator("page_token_keys", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return value.split(",") if isinstance(value, str) else value

    @field_validator("auth_secret")
    @classmethod
    def _long_enough(cls, value: SecretStr) -> SecretStr:
        if len(value.get_secret_value().encode()) < _SECRET_BYTES_MIN:
            raise ValueError(f"needs at least {_SECRET_BYTES_MIN} bytes")
        return value

    @field_validator("page_token_keys")
    @classmethod
    def _each_long_enough(cls, value: list[SecretStr]) -> list[SecretStr]:
        for key in value:
            cls._long_enough(key)
        return value


class MediaConfig(Config):
    """Of the services that show tweets."""

    media_base_url: str = Field("", pattern=r"^(https?://\S+)?$")
    """Where media are served; empty: tweets come without URLs of their media."""
    media_key: SecretStr = SecretStr("")
    """HMAC key of media URLs, at least 32 bytes; wanted with a base."""

    @field_validator("media_key")
    @classmethod
    def _wanted_with_a_base(cls, value: SecretStr, info: ValidationInfo) -> SecretStr:
        return cls._long_enough(value) if info.data.get("media_base_url") else value


@dataclass(frozen=True, slots=True)
class Where:
    """A cluster and a keyspace in it. `local_dc`: empty for the first contact point's."""

    contact_points: Sequence[str]
    keyspace: str
    port: int = 9042
    local_dc: str = ""


class CassandraConfig(BaseSettings):
    """Of the services that own a store: where Cassandra is, if it is to keep it."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, frozen=True)

    cassandra_contact_points: Annotated[list[str], NoDecode] = []
    """Addresses of some nodes, comma-separated; empty: SQLite keeps the store."""
    cassandra_port: int = Field(9042, ge=1, le=65_535)
    cassandra_keyspace: str = Field("starling", pattern=r"^[a-z][a-z0-9_]{0,47}$")
    cassandra_local_dc: str = ""
    """The data centre whose nodes are asked; empty: the first contact point's."""

    @field_validator("cassandra_contact_points", mode="before")
    @classmethod
    def _addresses(cls, value: object) -> object:
        return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value

    def cassandra(self) -> Where | None:
        """None: not wanted."""
        if not self.cassandra_contact_points:
            return None
        return Where(
            self.cassandra_contact_points, self.cassandra_keyspace, self.cassandra_port, self.cassandra_local_dc
        )


def wanted_without_cassandra(value: str, info: ValidationInfo) -> str:
    """A check of the variable that names a SQLite file."""
    # Where the nodes were given but are wrong, that is what is told.
    if not value and not info.data.get("cassandra_contact_points", True):
        raise ValueError("needed, unless STARLING_CASSANDRA_CONTACT_POINTS is set")
    return value


def load(cls: type[T]) -> T:
    """Read the environment, or exit with status 2 and one line per wrong variable."""
    try:
        return cls()
    except ValidationError as error:
        _refuse(error)


def _refuse(error: ValidationError) -> NoReturn:
    for problem in error.errors(include_input=False, include_url=False):
        name = ENV_PREFIX + str(problem["loc"][0]).upper()
        print(f"configuration: {name}: {problem['msg']}", file=sys.stderr)  # noqa: T201
    raise SystemExit(2)
