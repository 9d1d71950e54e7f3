"A dead address ends in one line, before a model is loaded; one that answers anything at all is taken."
import socket
import pytest
from endpoint_server import EndpointServer
from trace_nb.cli import main
from trace_nb.core.endpoint import check_address
from trace_nb.core.trajectory import InputError

DEAD = "http://127.0.0.1:9/v1"


@pytest.mark.parametrize("option, words", [("--sampler", ["train", "MultiStepRetail"]), ("--policy", ["evaluate", "--model", "m"]), ("--policy", ["probe", "--model", "m"])])
def test_a_dead_address(tmp_path, monkeypatch, capfd, option, words):
    monkeypatch.chdir(tmp_path)
    for place in ("trace_nb.core.policy.load_model", "trace_nb.core.policy.load_policy"): monkeypatch.setattr(place, lambda *_, **__: pytest.fail("it went on"))
    assert main([*words, option, DEAD]) == 2
    said = capfd.readouterr()
    assert said.out == "" and said.err.startswith(f"trace-nb: {option} {DEAD}: no server answers there") and said.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("url", ["http://no-such-host.invalid/v1", "http://127.0.0.1:99999/v1", "http:///v1"])
def test_addresses_that_lead_nowhere(url):
    with pytest.raises(InputError, match="no server answers there"): check_address(url, option="--sampler")


def test_a_refusal_is_an_answer():
    with EndpointServer(reply=lambda body: "x") as server: check_address(server.url)        # it has no /models: 501


def test_a_slow_server_is_there():
    with socket.create_server(("127.0.0.1", 0)) as listening: check_address(f"http://127.0.0.1:{listening.getsockname()[1]}/v1", seconds=.3)
