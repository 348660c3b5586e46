"""Where the settings say that the lake is, and that what opens it is shown nowhere."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark", reason="needs the extra pipeline")

from mediator.errors import SetupError
from mediator.parts import installed_settings
from pipeline.lake import REPORT, ObjectPlace
from pipeline.service import child_environment
from pipeline.settings import lake_of, report_file

SECRET = "nobody may see this"
URL = "s3://company-mail/lake"
STORE = {"lake": URL, "storage": {"aws_secret_access_key": SECRET, "aws_region": "eu-central-1"}}


def settings_of(tmp_path: Path, pipeline: dict[str, Any]) -> Any:
    return installed_settings()(data_dir=tmp_path, pipeline=pipeline)


def test_a_lake_is_in_a_folder_or_in_a_store(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, {})
    assert lake_of(settings) == tmp_path / "lake"
    assert lake_of(settings, str(tmp_path / "other")) == tmp_path / "other"
    assert report_file(settings, lake_of(settings)) == tmp_path / "lake" / REPORT
    assert lake_of(settings_of(tmp_path, {"lake": str(tmp_path / "third")})) == tmp_path / "third"
    settings = settings_of(tmp_path, STORE)
    place = lake_of(settings)
    assert isinstance(place, ObjectPlace)
    assert str(place / "events") == f"{URL}/events"
    assert dict((place / "events").options) == STORE["storage"]
    assert report_file(settings, place) == tmp_path / REPORT


def test_what_opens_a_store_is_shown_nowhere(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, STORE)
    shown = [repr(settings), json.dumps(settings.in_force()), settings.model_dump_json(), repr(lake_of(settings))]
    assert all(URL in text and SECRET not in text for text in shown)


def test_a_wrong_value_is_named_without_it(tmp_path: Path) -> None:
    file = tmp_path / "mediator.toml"
    file.write_text(f'[pipeline]\nlake = "hdfs://there/lake"\n[pipeline.storage]\naws_region = ["{SECRET}"]\n')
    with pytest.raises(SetupError) as refused:
        installed_settings().load(config=file)
    assert "pipeline.lake: expected a folder, or a URL that begins with s3://" in str(refused.value)
    assert "pipeline.storage.aws_region: expected text" in str(refused.value)
    assert SECRET not in str(refused.value)


def test_the_service_hands_both_to_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_of(tmp_path, STORE)
    for name, value in child_environment(settings).items():
        monkeypatch.setenv(name, value)
    assert lake_of(installed_settings().load()) == lake_of(settings)
