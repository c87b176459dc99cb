"""The deployment key and signatures."""

import os
import stat

import pytest

from penstock import signing
from penstock.errors import EnvironmentFault


@pytest.fixture(autouse=True)
def key_file(tmp_path, monkeypatch):
    """A separate key file for the test."""
    path = tmp_path / "config" / "key"
    monkeypatch.setenv(signing.KEY_FILE, str(path))
    before = signing.deployment_key() if signing._key is not None else None
    signing.use_key(None)
    yield path
    signing.use_key(before)


def test_the_key_is_created_once_and_only_its_owner_can_read_it(key_file):
    key = signing.deployment_key()
    assert stat.S_IMODE(key_file.stat().st_mode) == 0o600
    assert stat.S_IMODE(key_file.parent.stat().st_mode) == 0o700
    signing.use_key(None)
    assert signing.deployment_key() == key
    assert os.listdir(key_file.parent) == ["key"]


def test_a_signature_holds_for_its_data_purpose_and_key_only():
    signature = signing.sign("replay", b"data")
    assert signing.is_signed("replay", b"data", signature)
    assert not signing.is_signed("replay", b"date", signature)
    assert not signing.is_signed("state", b"data", signature)
    assert not signing.is_signed("replay", b"data", signature[:-1])
    signing.use_key(b"another key of 32 bytes ........")
    assert not signing.is_signed("replay", b"data", signature)


@pytest.mark.parametrize(("mode", "text", "says"), [(0o640, "00" * 32, "mode 640"), (0o600, "abc", "32 bytes")])
def test_a_key_file_that_others_can_read_or_that_holds_no_key_is_rejected(key_file, mode, text, says):
    key_file.parent.mkdir()
    key_file.write_text(text)
    key_file.chmod(mode)
    with pytest.raises(EnvironmentFault, match=says):
        signing.deployment_key()
