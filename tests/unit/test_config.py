"""Configuration: from the environment, refused at boot by name."""

import pytest

from graph_svc.__main__ import GraphConfig
from launcher.plan import without_login
from mesh.config import Config, Where, load
from mesh.eventlog.choice import open_log
from mesh.eventlog.kafka import KafkaProducer
from mesh.eventlog.valkey_streams import StreamsProducer
from mesh.valkey import Valkey
from mesh.valkey_cluster import ValkeyCluster, connect_to

SECRET = "a secret that is at least 32 bytes long"
GOOD = {"STARLING_AUTH_SECRET": SECRET, "STARLING_PAGE_TOKEN_KEYS": f"{SECRET},{SECRET}2"}


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name, value in GOOD.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


@pytest.mark.usefixtures("environment")
def test_a_configuration_comes_from_the_environment() -> None:
    config = load(Config)
    assert config.auth_secret.get_secret_value() == SECRET
    assert [key.get_secret_value() for key in config.page_token_keys] == [SECRET, SECRET + "2"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("STARLING_AUTH_SECRET", "short"),
        ("STARLING_PAGE_TOKEN_KEYS", f"{SECRET},short"),
        ("STARLING_PAGE_TOKEN_KEYS", ""),
        ("STARLING_MAX_MESSAGE_BYTES", "many"),
        ("STARLING_GRACE_SECONDS", "-1"),
        ("STARLING_LOG_LEVEL", "loud"),
        ("STARLING_KEY_PREFIX", "white space"),
        ("STARLING_VALKEY_URL", "nonsense"),
        ("STARLING_EVENTLOG_URL", "redis://127.0.0.1:6379"),
        ("STARLING_EVENTLOG_URL", "kafka://127.0.0.1"),
        ("STARLING_EVENTLOG_URL", "kafka://a:1,b:2?replication=0"),
        ("STARLING_CONCURRENT_CALLS_MAX", "0"),
    ],
)
def test_a_wrong_variable_is_named_and_its_value_kept_secret(
    environment: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, value: str
) -> None:
    environment.setenv(name, value)
    with pytest.raises(SystemExit) as refused:
        load(Config)
    assert refused.value.code == 2
    said = capsys.readouterr().err
    assert f"configuration: {name}: " in said
    assert SECRET not in said


def test_a_cluster_of_valkey_wants_another_log(
    environment: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    environment.setenv("STARLING_VALKEY_URL", "valkey-cluster://user:secret@a:1,b.example:2")
    with pytest.raises(SystemExit):
        load(Config)
    assert "configuration: STARLING_EVENTLOG_URL: " in capsys.readouterr().err
    environment.setenv("STARLING_EVENTLOG_URL", "kafka://a:1")
    url = load(Config).valkey_url
    assert isinstance(connect_to(url), ValkeyCluster)
    assert without_login(url) == "valkey-cluster://a:1,b.example:2"


def test_the_log_is_chosen_by_its_variable(environment: pytest.MonkeyPatch) -> None:
    nowhere = Valkey("redis://127.0.0.1:1")
    assert isinstance(open_log(load(Config), nowhere).producer([]), StreamsProducer)
    environment.setenv("STARLING_EVENTLOG_URL", "kafka://a:1,b.example:2?replication=2")
    assert isinstance(open_log(load(Config), nowhere).producer([]), KafkaProducer)


def test_a_missing_variable_is_named(environment: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    environment.delenv("STARLING_AUTH_SECRET")
    with pytest.raises(SystemExit):
        load(Config)
    assert "configuration: STARLING_AUTH_SECRET: " in capsys.readouterr().err


@pytest.mark.usefixtures("environment")
def test_secrets_do_not_show_when_a_configuration_is_printed() -> None:
    assert SECRET not in repr(load(Config))


@pytest.mark.usefixtures("environment")
def test_a_store_is_on_sqlite_or_on_cassandra(
    environment: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        load(GraphConfig)
    assert "configuration: STARLING_GRAPH_DATABASE: " in capsys.readouterr().err
    environment.setenv("STARLING_CASSANDRA_CONTACT_POINTS", "10.0.0.1, 10.0.0.2")
    assert load(GraphConfig).cassandra() == Where(["10.0.0.1", "10.0.0.2"], "starling")
    environment.setenv("STARLING_CASSANDRA_KEYSPACE", "No-Name")
    with pytest.raises(SystemExit):
        load(GraphConfig)
    assert "configuration: STARLING_CASSANDRA_KEYSPACE: " in capsys.readouterr().err
