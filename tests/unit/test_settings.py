"""Settings: groups, defaults, the command line, and invalid values."""

import dataclasses
import pickle

import pytest

from penstock import (
    Delivery,
    Flow,
    Lifecycle,
    Migration,
    Placement,
    Scaling,
    SettingError,
    Settings,
    Transport,
)
from penstock.settings import BY_NAME, GROUPS, full_name


def refused(call):
    with pytest.raises(SettingError) as caught:
        call()
    assert caught.value.exit_code == 2
    return str(caught.value)


def parse(*texts):
    return Settings.parse(texts)


# ---- groups


def test_every_setting_has_a_reason():
    for spec in [*dataclasses.fields(Settings), *BY_NAME.values()]:
        assert spec.metadata["why"], spec.name


def test_every_field_of_settings_is_a_group_the_seed_or_the_user_s_own_values():
    assert [spec.name for spec in dataclasses.fields(Settings)] == [*GROUPS, "seed", "conf"]


@pytest.mark.parametrize("kind", GROUPS.values(), ids=GROUPS)
def test_the_first_field_of_a_group_may_be_given_by_position_and_no_other(kind):
    first, second, *_ = dataclasses.fields(kind)
    assert getattr(kind(first.default), first.name) == first.default
    with pytest.raises(TypeError):
        kind(first.default, second.default)


def test_groups_are_given_whole():
    settings = Settings(delivery=Delivery("exactly_once", epoch_interval=1.0), flow=Flow("credit"), seed=3)
    assert settings.delivery.guarantee == "exactly_once"
    assert settings.delivery.epoch_interval == 1.0
    assert settings.delivery.on_error == "drop"
    assert (settings.flow.mode, settings.seed) == ("credit", 3)


def test_a_value_where_a_group_belongs():
    text = refused(lambda: Settings(delivery="exactly_once"))
    assert "setting delivery: 'exactly_once' is not a Delivery" in text
    assert "Write delivery=Delivery('exactly_once')." in text


def test_settings_are_values():
    assert Settings() == Settings()
    settings = Settings(scaling=Scaling("rate"), conf={"a": 1})
    assert pickle.loads(pickle.dumps(settings)) == settings
    assert settings != Settings()
    assert hash(settings.scaling) == hash(Scaling("rate"))
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.seed = 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.flow.mode = "none"


# ---- by dotted names


def test_with_values_takes_dotted_names():
    changed = Settings(flow=Flow("credit")).with_values(
        {"flow.load_factor": 0.7, "delivery": "exactly_once", "scaling": Scaling("rate"), "conf.n": 3, "seed": 7}
    )
    assert changed.flow == Flow("credit", load_factor=0.7)
    assert (changed.delivery, changed.scaling) == (Delivery("exactly_once"), Scaling("rate"))
    assert (changed.conf, changed.seed) == ({"n": 3}, 7)


def test_with_values_takes_a_whole_group_and_a_value_of_it():
    changed = Settings().with_values({"scaling": Scaling("rate"), "scaling.most": 4})
    assert changed.scaling == Scaling("rate", most=4)


def test_values_that_only_fit_together_may_come_in_any_order():
    values = {"migration.recovery": 0.85, "flow.load_factor": 0.9}
    for order in (values, dict(reversed(values.items()))):
        assert Settings().with_values(order).migration.recovery == 0.85


def test_parse_converts_to_the_setting_s_type():
    parsed = parse("transport.linger=0.5", "flow.inbox_capacity=10", "delivery.on_error=stop", "seed=7")
    assert (parsed.transport.linger, parsed.flow.inbox_capacity) == (0.5, 10)
    assert (parsed.delivery.on_error, parsed.seed) == ("stop", 7)


def test_a_group_s_name_alone_is_its_first_setting():
    parsed = parse("delivery=exactly_once", "flow=credit", "migration=off", "transport=0.5", "scaling=rate")
    assert (parsed.delivery.guarantee, parsed.flow.mode, parsed.migration.enabled) == (
        "exactly_once",
        "credit",
        False,
    )
    assert (parsed.transport.linger, parsed.scaling.policy) == (0.5, "rate")
    assert full_name("delivery") == "delivery.guarantee"


def test_the_last_value_of_a_name_counts():
    assert parse("delivery=exactly_once", "delivery.guarantee=at_least_once").delivery == Delivery("at_least_once")


def test_parse_leaves_the_rest_alone():
    base = Settings(transport=Transport(1.0), conf={"a": 1})
    parsed = Settings.parse(["seed=3", "transport.frame_bytes=9"], base=base)
    assert (parsed.transport, parsed.conf, base.seed) == (Transport(1.0, frame_bytes=9), {"a": 1}, 0)


@pytest.mark.parametrize(("text", "value"), [("true", True), ("Yes", True), ("0", False), ("off", False)])
def test_parse_reads_switches(text, value):
    assert parse(f"transport.fusing={text}").transport.fusing is value


def test_parse_takes_the_user_s_own_values():
    texts = ["conf.n=3", "conf.rate=2.5", "conf.name=a=b", "conf.deep.er=x"]
    parsed = Settings.parse(texts, base=Settings(conf={"keep": 1}))
    assert parsed.conf == {"keep": 1, "n": 3, "rate": 2.5, "name": "a=b", "deep.er": "x"}


# ---- names that do not exist


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("flow.laod_factor", "flow.load_factor"),
        ("linger", "transport.linger"),
        ("ligner", "transport.linger"),
        ("lingr", "transport.linger"),
        ("flow.linger", "transport.linger"),
        ("scaling_interval", "scaling.interval"),
        ("interval", "migration.interval, scaling.interval or monitor.interval"),
        ("delivry", "delivery"),
    ],
)
def test_a_typo_is_corrected(name, meant):
    text = refused(lambda: parse(f"{name}=1"))
    assert text == f"setting {name}: there is no such setting. Did you mean {meant}?"
    assert refused(lambda: Settings().with_values({name: 1})) == text


def test_an_unknown_setting_lists_them_all():
    text = refused(lambda: parse("xyzzy=1"))
    assert "no such setting" in text
    assert "delivery.epoch_interval, delivery.guarantee, delivery.max_spout_pending" in text


def test_a_word_without_a_sign():
    assert "--set linger: 'linger' does not have the form NAME=VALUE" in refused(lambda: parse("linger"))
    assert "--set =3: '=3' does not have the form NAME=VALUE" in refused(lambda: parse("=3"))


def test_own_values_have_names():
    assert refused(lambda: parse("conf=3")) == (
        "--set conf=3: conf is a group of values that you name yourself. "
        "Write --set conf.NAME=3 to set one of your own values."
    )


def test_a_choice_that_is_misspelt():
    assert refused(lambda: parse("delivery=exactly-once")) == (
        "setting delivery.guarantee: 'exactly-once' is not one of at_most_once, at_least_once, exactly_once. "
        "Did you mean exactly_once?"
    )


# ---- values that do not fit


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("transport.linger=fast", ("setting transport.linger: 'fast' is not a number.",)),
        ("seed=1.5", ("setting seed: '1.5' is not a whole number.",)),
        ("transport.fusing=maybe", ("setting transport.fusing", "true nor false", "'maybe'")),
        ("delivery.on_error=ignore", ("setting delivery.on_error", "one of drop, stop", "'ignore'")),
        ("delivery=twice", ("setting delivery.guarantee", "one of at_most_once, at_least_once", "'twice'")),
        ("transport.linger=-1", ("setting transport.linger", "-1.0")),
        ("transport.frame_bytes=0", ("setting transport.frame_bytes", "greater than 0", "0")),
        ("transport.linger=nan", ("setting transport.linger", "nan")),
        ("flow.load_factor=0.4", ("setting flow.load_factor", "between 0.5 and 1", "0.4", "The default is 0.8.")),
        ("flow.step_factor=1", ("setting flow.step_factor", "greater than 1", "1.0", "Try 2.")),
        ("migration.alpha=1", ("setting migration.alpha", "between 0 and 1", "1.0", "Try 0.3.")),
        (
            "migration.recovery=0.8",
            ("setting migration.recovery", "flow.load_factor, 0.8", "0.8", "Try 0.5."),
        ),
        (
            "placement.fill=1.5",
            ("setting placement.fill", "it must be a share, above 0 and up to 1", "1.5", "Try 0.9."),
        ),
        (
            "placement.cpu_limit=1.5",
            ("setting placement.cpu_limit", "it must be a share, above 0 and up to 1", "1.5", "Try 0.8."),
        ),
        ("placement.watts=1,2,3", ("setting placement.watts", "four numbers", "'1,2,3'", "35,40,8,4")),
    ],
)
def test_values_that_do_not_fit(text, parts):
    message = refused(lambda: parse(text))
    for part in parts:
        assert part in message, message


@pytest.mark.parametrize(
    ("make", "name"),
    [(Lifecycle, "max_restarts"), (Transport, "linger"), (Settings, "seed"), (Flow, "inbox_time")],
)
def test_where_zero_is_allowed_the_message_of_a_negative_does_not_ask_for_more(make, name):
    assert getattr(make(**{name: 0}), name) == 0
    assert "greater than 0" not in refused(lambda: make(**{name: -1}))


@pytest.mark.parametrize(
    ("make", "given", "problem"),
    [
        (Transport, {"linger": "0.1"}, "not a number"),
        (Flow, {"inbox_capacity": None}, "not a whole number"),
        (Transport, {"fusing": "no"}, "neither true nor false"),
        (Migration, {"enabled": 1}, "neither true nor false"),
        (Placement, {"spare_slots": True}, "not a whole number"),
        (Delivery, {"state_dir": 7}, "not a text"),
        (Settings, {"seed": 1.5}, "not a whole number"),
    ],
)
def test_the_constructor_checks_types_as_well(make, given, problem):
    ((name, value),) = given.items()
    group = "" if make is Settings else f"{make.group_name()}."
    assert refused(lambda: make(**given)) == f"setting {group}{name}: {value!r} is {problem}."


@pytest.mark.parametrize(
    ("texts", "parts"),
    [
        (["scaling=sometimes"], ("setting scaling.policy", "one of off, failures, rate", "'sometimes'")),
        (["scaling.least=8", "scaling.most=4"], ("setting scaling.most", "at least scaling.least, 8", "4")),
        (["scaling.samples=1"], ("setting scaling.samples", "at least 2", "1", "Try 6.")),
        (["scaling.target=0.8"], ("setting scaling.target", "between 0 and 0.8", "0.8", "Try 0.7.")),
        (
            ["scaling=rate", "scaling.interval=0.4"],
            ("setting scaling.interval", "lifecycle.metrics_interval, 0.25 s", "0.4", "Try 5."),
        ),
        (
            ["monitor=memory", "monitor.interval=0.9"],
            ("setting monitor.interval", "four reports of lifecycle.metrics_interval, 0.25 s", "0.9", "Try 30."),
        ),
    ],
)
def test_groups_that_do_not_fit_together(texts, parts):
    message = refused(lambda: parse(*texts))
    for part in parts:
        assert part in message, message


def test_an_interval_of_load_samples_that_nobody_looks_at_is_no_error():
    assert Settings(lifecycle=Lifecycle(metrics_interval=10.0)).scaling.policy == "off"


def test_load_is_watched_for_a_database_or_for_erdm():
    assert not Settings().monitored
    assert parse("monitor=memory").monitored
    assert Settings(placement=Placement("erdm")).monitored


def test_a_number_of_ackers_that_no_cluster_starts_is_refused():
    assert Delivery("at_least_once", ackers=256).ackers == 256
    with pytest.raises(SettingError, match=r"setting delivery\.ackers: it must be at most 256, not 100000\."):
        Delivery("at_least_once", ackers=100_000)
