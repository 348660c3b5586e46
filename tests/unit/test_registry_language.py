"""Data in a text is told from language: base64, hashes and data URIs are left out, words and identifiers are not."""

import base64
import hashlib
import random

import pytest

from registry.cards.card import Card, Skill
from registry.embedding.texts import card_texts
from registry.index.analysis import analyze, search_texts, without_data
from registry.index.keywords import IndexDocument

pytestmark = pytest.mark.rule("G3")

BYTES = random.Random(1).randbytes(450)
DATA = [
    base64.b64encode(BYTES).decode(),
    base64.urlsafe_b64encode(BYTES[:64]).decode(),
    f"data:image/png;base64,{base64.b64encode(BYTES[:9]).decode()}",
    "data:text/plain;charset=utf-8,high%20water",
    hashlib.md5(BYTES, usedforsecurity=False).hexdigest(),
    hashlib.sha256(BYTES).hexdigest().upper(),
    "f3094b2f-501a-4931-aa9c-f2ace5b455e1",
    "0x98aF2b1cD5e7b7e8b6D3Cf9A1b4e4B5C6A7F8B9C",
    "A" * 400,
]


@pytest.mark.parametrize("data", DATA)
def test_data_in_cards_and_requests_takes_no_part_in_ranking(data: str) -> None:
    def card(*more: str) -> Card:
        said = " ".join(("Tells high", *more, "water for harbours."))
        skill = Skill("tides", "next tide", said, examples=(f"when is high water? {' '.join(more)}",))
        return Card("a", "Tide Table", said, (skill,), tags=("sea", *more))

    assert IndexDocument.of(card(data)).terms == IndexDocument.of(card()).terms
    assert [text.split() for text in card_texts(card(data))] == [text.split() for text in card_texts(card())]
    assert analyze(f"the {data} tide") == analyze("the tide")
    request = "When is high water?{} Where can I berth then?"
    assert [piece.split() for piece in search_texts(request.format(f" {data}"))] == [
        piece.split() for piece in search_texts(request.format(""))
    ]


@pytest.mark.parametrize(
    "text",
    [
        "get_stands_mrt__train_no__wagons__wagon_no__standrows__standrows_no__seats_get",
        "calculateConvectiveHeatTransferCoefficient",
        "google-ads-shopping-microsoft-ads-pay-per-click",
        "https://stackoverflow.com/questions/40240796/angular-2-best-approach-to-use-filesaver-js",
        "/root/music/mixkit-retro-game-emergency-alarm-1000.wav",
        "amex,diners,discover,jcb,maestro,mastercard,visa,visa13,visa16,visa19",
        "根据时间（公历或农历）、性别来获取八字信息。solarDatetime和lunarDatetime必须传且只传其中一个。",
        "Rindfleischetikettierungsüberwachungsaufgabenübertragungsgesetz",
        "the data: high, low",
        "en/de/fr/es/it/pt/nl/pl/cs/sk/hu/ro/bg/el",
        "get_user_id_by_tx_id_or_ip_v4_or_v6",
        "X509_PKI_TLS1_3_AES256_GCM_SHA2_ED25519",
    ],
)
def test_words_identifiers_and_scripts_without_spaces_are_kept(text: str) -> None:
    assert without_data(text) == text


def test_a_request_of_data_alone_is_kept() -> None:
    assert search_texts(DATA[0]) == [DATA[0]]


def test_long_data_is_removed_in_linear_time() -> None:
    for hard in ("data:" * 200_000, "data:a/a;" * 100_000, "a/b+c=" * 200_000, "aB" * 500_000, "-" * 1_000_000):
        without_data(hard)
