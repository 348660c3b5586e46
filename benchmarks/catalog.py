"""Generates agent cards and requests for them from a few hundred words; deterministic."""

import json
import random
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate
from typing import Any

DOMAINS = (
    "accounting", "agriculture", "archives", "astronomy", "banking", "biology", "catering", "chemistry",
    "construction", "customs", "education", "elections", "energy", "fashion", "fisheries", "forestry", "geology",
    "hospitals", "hotels", "insurance", "journalism", "laboratories", "law", "libraries", "logistics",
    "manufacturing", "marketing", "medicine", "meteorology", "mining", "museums", "music", "navigation", "nutrition",
    "payroll", "pharmacy", "photography", "procurement", "publishing", "railways", "recruiting", "retail", "robotics",
    "security", "shipping", "sports", "surveying", "taxes", "telephony", "theatre", "tourism", "translation",
    "utilities", "veterinary", "warehouses", "welfare",
)  # fmt: skip
VERBS = (
    "analyse", "summarise", "translate", "schedule", "forecast", "classify", "extract", "compare", "verify", "draft",
    "monitor", "route", "convert", "index", "rank", "reconcile", "estimate", "book", "cancel", "track", "merge",
    "validate", "annotate", "transcribe", "encrypt", "archive", "approve", "calculate", "detect", "visualise", "plan",
    "negotiate", "simulate", "audit", "clean", "deduplicate", "recommend", "locate", "measure", "inspect", "assign",
    "notify", "publish", "redact", "search", "sign", "split", "synthesise", "tag", "transform",
)  # fmt: skip
OBJECTS = (
    "invoices", "contracts", "calendars", "recordings", "images", "maps", "orders", "shipments", "prescriptions",
    "timetables", "sensors", "budgets", "emails", "tickets", "passports", "samples", "patents", "receipts", "videos",
    "forecasts", "ledgers", "complaints", "reviews", "blueprints", "genomes", "menus", "permits", "licences",
    "playlists", "questionnaires", "routes", "salaries", "spreadsheets", "subtitles", "telescopes", "trials",
    "vouchers", "wagons", "weather", "yields", "addresses", "appointments", "auctions", "backups", "barcodes",
    "bridges", "cargo", "catalogues", "chats", "claims", "clauses", "clusters", "courses", "crops", "currencies",
    "dashboards", "databases", "deadlines", "deliveries", "diagnoses", "documents", "donations", "drawings", "drones",
    "engines", "essays", "events", "exams", "exchanges", "expenses", "fares", "fingerprints", "flights", "fonts",
    "fuel", "galleries", "glossaries", "grants", "harvests", "holidays", "inventories", "keys", "labels", "lectures",
    "letters", "loans", "logs", "manuscripts", "markets", "meters", "minutes", "molecules", "mortgages", "networks",
    "notes", "parcels", "passwords", "payments", "pipelines", "podcasts", "policies", "portfolios", "prices",
    "proteins", "queues", "quotes", "rainfall", "refunds", "rents", "repairs", "reports", "reservations", "rosters",
    "satellites", "scans", "schemas", "scores", "seats", "signatures", "soil", "stocks", "surveys", "tariffs",
    "tenders", "theses", "tides", "timers", "traffic", "transcripts", "turbines", "vaccines", "valves", "vehicles",
    "wages", "warranties", "wills", "workflows", "x-rays",
)  # fmt: skip
QUALITIES = (
    "within seconds", "in several languages", "with full history", "for small teams", "across time zones",
    "without storing anything", "under strict confidentiality", "from handwritten pages", "on a fixed budget",
    "with hourly updates", "for regulated companies", "by priority", "offline", "in bulk", "with human approval",
    "from noisy sources", "according to local rules", "at night", "with explanations", "for beginners",
    "in real time", "by region", "step by step", "for every department", "with few errors", "as plain tables",
)  # fmt: skip
FUNCTION_WORDS = frozenset((
    "a", "an", "and", "are", "as", "at", "by", "can", "do", "for", "from", "has", "have", "i", "in", "into", "is", "it",
    "its", "me", "must", "my", "of", "on", "or", "our", "should", "so", "some", "that", "the", "them", "then", "this",
    "to", "under", "want", "we", "which", "who", "will", "with", "without", "you", "your",
))  # fmt: skip
MAX_SKILLS = 6
"""Of a card."""
_SUBJECTS = (
    "agro", "aero", "audio", "bio", "cyber", "eco", "electro", "geo", "hydro", "macro", "medi", "micro", "nano",
    "neuro", "photo", "poly", "rail", "sino", "socio", "tele", "thermo", "trans", "urban", "video",
)  # fmt: skip
_MANNERS = ("auto", "co", "cross", "fore", "inter", "over", "pre", "re", "sub", "up")
_THINGS = OBJECTS + tuple(subject + thing for thing in OBJECTS for subject in _SUBJECTS)
_DEEDS = VERBS + tuple(manner + verb for verb in VERBS for manner in _MANNERS)
_FIELDS = DOMAINS + tuple(subject + domain for domain in DOMAINS for subject in _SUBJECTS)
_OPENINGS = ("I need an agent that can", "Who can", "We want you to", "Find someone who will", "It should", "Please")
_SYLLABLES = tuple(head + vowel for head in "bdfgklmnprstvz" for vowel in ("a", "e", "i", "o", "u", "an", "or", "el"))
_BRANDS = 20_000
"""Names that nearly nobody shares, as catalogs are full of."""


def cards(count: int) -> Iterator[bytes]:
    """Yield A2A cards of about 600 to 1200 bytes, with one to six skills, at the mailboxes ``agent.0`` and so on."""
    writer = _Writer("cards")
    for number in range(count):
        yield json.dumps(_card(writer, number)).encode()


def requests(count: int, sentences: int, name: str) -> list[str]:
    """Return ``count`` different requests; each ``name`` has its own, so no cache knows them."""
    writer = _Writer(name)
    return [" ".join(_request(writer) for _ in range(sentences)) for _ in range(count)]


def _card(writer: "_Writer", number: int) -> dict[str, Any]:
    name = f"{writer.brand()} {writer.pick(_FIELDS)} {writer.pick(('agent', 'assistant', 'service', 'desk', 'bot'))}"
    skills = [_skill(writer) for _ in range(writer.number(1, MAX_SKILLS))]
    return {
        "name": name,
        "description": ". ".join(writer.task() for _ in range(2 if len(skills) > 3 else 5)) + ".",
        "version": f"1.{number % 10}.0",
        "supportedInterfaces": [{"url": "nats://localhost:4222", "protocolBinding": "NATS", "protocolVersion": "1.0"}],
        "capabilities": {},
        "defaultInputModes": ["text/plain"],
        "defaultOutputModes": ["text/plain"],
        "skills": skills,
        "mailbox": f"agent.{number}",
    }


def _skill(writer: "_Writer") -> dict[str, Any]:
    verb, thing = writer.pick(_DEEDS), writer.pick(_THINGS)
    return {
        "id": f"{verb}-{thing}",
        "name": f"{verb.capitalize()} {thing}",
        "description": f"{writer.task()} {writer.pick(QUALITIES)}",
        "tags": [writer.pick(_FIELDS)],
    }


def _request(writer: "_Writer") -> str:
    return f"{writer.pick(_OPENINGS)} {writer.task()} and {writer.pick(_THINGS)} {writer.pick(QUALITIES)}."


class _Writer:
    """Picks words with a natural frequency distribution: few are common, most are rare."""

    def __init__(self, name: str) -> None:
        brands = random.Random("brands")
        self._brands = ["".join(brands.choices(_SYLLABLES, k=3)).capitalize() for _ in range(_BRANDS)]
        self._dice = random.Random(name)

    def pick(self, words: Sequence[str]) -> str:
        return self._dice.choices(words, cum_weights=_commonness(len(words)))[0]

    def number(self, low: int, high: int) -> int:
        return self._dice.randint(low, high)

    def brand(self) -> str:
        return self.pick(self._brands)

    def task(self) -> str:
        return f"{self.pick(_DEEDS)} {self.pick(_THINGS)} for {self.pick(_FIELDS)}"


@cache
def _commonness(count: int) -> list[float]:
    return list(accumulate(1 / (rank + 50) for rank in range(count)))
