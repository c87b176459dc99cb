"""Settings: defaults, what the command line says, what does not fit."""

import dataclasses

import pytest

from penstock import SettingError, Settings


def refused(call):
    with pytest.raises(SettingError) as caught:
        call()
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_every_setting_has_a_reason():
    for spec in dataclasses.fields(Settings):
        assert spec.metadata["why"], spec.name


def test_parse_converts_to_the_setting_s_type():
    parsed = Settings().parse(["linger=0.5", "inbox_capacity=10", "on_error=stop", "seed=7"])
    assert (parsed.linger, parsed.inbox_capacity, parsed.on_error, parsed.seed) == (0.5, 10, "stop", 7)


def test_parse_leaves_the_rest_alone():
    start = Settings(linger=1.0, conf={"a": 1})
    parsed = start.parse(["seed=3"])
    assert (parsed.linger, parsed.conf, start.seed) == (1.0, {"a": 1}, 0)


@pytest.mark.parametrize(("text", "value"), [("true", True), ("Yes", True), ("0", False), ("off", False)])
def test_parse_reads_switches(text, value):
    assert Settings().parse([f"chaining={text}"]).chaining is value


def test_parse_takes_the_user_s_own_values():
    parsed = Settings(conf={"keep": 1}).parse(["conf.n=3", "conf.rate=2.5", "conf.name=a=b", "conf.deep.er=x"])
    assert parsed.conf == {"keep": 1, "n": 3, "rate": 2.5, "name": "a=b", "deep.er": "x"}


def test_a_typo_is_corrected():
    text = refused(lambda: Settings().parse(["ligner=1"]))
    assert text == "setting ligner: no such setting. Did you mean linger?"


def test_an_unknown_setting_lists_them_all():
    text = refused(lambda: Settings().parse(["xyzzy=1"]))
    assert "no such setting" in text
    assert "busy_linger, chaining, crash_at, delivery" in text


def test_a_word_without_a_sign():
    assert "--set linger: must read key=value" in refused(lambda: Settings().parse(["linger"]))


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("linger=fast", ("setting linger", "type float", "'fast'")),
        ("seed=1.5", ("setting seed", "type int", "'1.5'")),
        ("chaining=maybe", ("setting chaining", "true or false", "'maybe'")),
        ("on_error=ignore", ("setting on_error", "one of drop, stop", "'ignore'")),
        ("linger=-1", ("setting linger", "-1.0")),
        ("frame_bytes=0", ("setting frame_bytes", "greater than 0", "got 0")),
        ("linger=nan", ("setting linger", "nan")),
    ],
)
def test_values_that_do_not_fit(text, parts):
    message = refused(lambda: Settings().parse([text]))
    for part in parts:
        assert part in message, message


@pytest.mark.parametrize("name", ["seed", "max_restarts", "linger"])
def test_where_zero_is_allowed_the_message_of_a_negative_does_not_ask_for_more(name):
    assert getattr(Settings(**{name: 0}), name) == 0
    assert "greater than 0" not in refused(lambda: Settings(**{name: -1}))


@pytest.mark.parametrize("given", [{"linger": "0.1"}, {"inbox_capacity": None}, {"chaining": "no"}, {"seed": 1.5}])
def test_the_constructor_checks_types_as_well(given):
    (name,) = given
    assert f"setting {name}" in refused(lambda: Settings(**given))


@pytest.mark.parametrize(
    ("texts", "parts"),
    [
        (["scaling=sometimes"], ("setting scaling", "one of off, failures, rate", "'sometimes'")),
        (["scaling_least=8", "scaling_most=4"], ("setting scaling_most", "at least scaling_least, 8", "got 4")),
        (["scaling_windows=1"], ("setting scaling_windows", "at least 2", "got 1", "Try 6.")),
        (["scaling_target=0.8"], ("setting scaling_target", "between 0 and 0.8", "got 0.8", "Try 0.7.")),
        (
            ["scaling=rate", "scaling_window=0.4"],
            ("setting scaling_window", "metrics_interval, 0.25 s", "got 0.4", "Try 5."),
        ),
    ],
)
def test_scaling_that_does_not_fit(texts, parts):
    message = refused(lambda: Settings().parse(texts))
    for part in parts:
        assert part in message, message


def test_a_window_of_reports_that_nobody_looks_at_is_no_error():
    assert Settings(metrics_interval=10.0).scaling == "off"
