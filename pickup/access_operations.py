"""The operations on the operator's allow and deny lists."""

from mediator.errors import BadRequestError
from mediator.operate.operations import (
    COUNT,
    FLAG,
    TEXT,
    TIME,
    Answer,
    OperationRequest,
    Right,
    Schema,
    about,
    many,
    obj,
    operation,
    read_number,
    read_text,
    whole,
)
from pickup.access_lists import AccessLists
from pickup.rules.granting import MAX_NOTE, MAX_RULES
from pickup.rules.records import AccessRule, Verdict

_VERDICT: Schema = {"type": "string", "enum": [verdict.value for verdict in Verdict], "description": "Which list."}
_NAME = about(TEXT, "A DID, a key (base58 or did:key), an IP address or a network.", minLength=1)
_RULE = obj(list=_VERDICT, name=TEXT, note=TEXT, created_at=TIME)

_FIELDS = {"list": _VERDICT, "name": _NAME}


class AccessOperations:
    """List, add and remove. Changes hold on all instances, and end what is denied; times are Unix seconds."""

    def __init__(self, access: AccessLists) -> None:
        self._access = access

    @operation(
        "access-list",
        Right.READ,
        "The allow or the deny list of the DIDComm door",
        obj(names=many(_RULE), total=about(COUNT, "How many there are to be paged through.")),
        fields={
            "list": _VERDICT,
            "text": about(TEXT, "Only what has this in its name or its note."),
            "skip": whole("Leave out the first.", 0, MAX_RULES, default=0),
            "limit": whole("List at most this many.", 1, MAX_RULES, default=MAX_RULES),
        },
        path="/access/{list}",
    )
    async def _list(self, request: OperationRequest) -> Answer:
        text, skip = read_text(request, "text").lower(), read_number(request, "skip", 0, MAX_RULES)
        limit = read_number(request, "limit", 1, MAX_RULES)
        rules = self._access.rules(_verdict(request))
        found = [rule for rule in rules if text in rule.name.lower() or text in rule.note.lower()]
        return {"names": [_rule(rule) for rule in found[skip : skip + limit]], "total": len(found)}

    @operation(
        "access-add",
        Right.OPERATE,
        "Allow or deny a DID, a key or a network",
        _RULE,
        fields={**_FIELDS, "note": about(TEXT, "Why, for other operators.", maxLength=MAX_NOTE, default="")},
        required=("name",),
        method="POST",
        path="/access/{list}",
    )
    async def _add(self, request: OperationRequest) -> Answer:
        name, note = read_text(request, "name"), read_text(request, "note")
        return _rule(await self._access.add(_verdict(request), name, note))

    @operation(
        "access-remove",
        Right.OPERATE,
        "Take a name off the allow or the deny list",
        obj(list=_VERDICT, name=TEXT, removed=FLAG),
        fields=_FIELDS,
        required=("name",),
        method="DELETE",
        path="/access/{list}",
    )
    async def _remove(self, request: OperationRequest) -> Answer:
        verdict = _verdict(request)
        name = await self._access.remove(verdict, read_text(request, "name"))
        return {"list": verdict.value, "name": name, "removed": True}


def _verdict(request: OperationRequest) -> Verdict:
    text = read_text(request, "list")
    if text not in list(Verdict):
        raise BadRequestError("list", "expected allow or deny")
    return Verdict(text)


def _rule(rule: AccessRule) -> Answer:
    return {"list": rule.verdict.value, "name": rule.name, "note": rule.note, "created_at": rule.created_at / 1000}
