"""docs/asyncapi.json is a document of AsyncAPI 3.0 by the schema that the specification publishes."""

import json

import jsonschema

from docs.generators.asyncapi import document
from tests.harness.node import FOLDER, install


def test_the_document_fits_the_specification() -> None:
    install()
    schemas = FOLDER / "node_modules" / "@asyncapi" / "specs" / "schemas"
    schema = json.loads((schemas / "3.0.0.json").read_text(encoding="utf-8"))
    jsonschema.Draft7Validator(schema).validate(document())
    assert not jsonschema.Draft7Validator(schema).is_valid({**document(), "channels": {"a": {"addres": "b"}}})
