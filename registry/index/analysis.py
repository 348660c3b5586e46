"""Text analysis of cards and requests: what is language in them, sentences, words, and the terms of the index.

Base64, hashes and data URIs say nothing about what an agent does.
"""

import re
import threading
import unicodedata
from functools import lru_cache

import Stemmer

MIN_RUN = 32
"""Characters from which a run may be data: the length of the shortest hash in common use."""
LONGEST_WORD = 64
"""Letters or digits in a row that may still be one word."""
_MIN_PART = 3.0
"""Average characters in a part of an identifier, at least; the parts of random base64 have two."""
_MAX_SEGMENT = 5.0
"""Average characters in a segment of a path or list of codes, at most; the segments of random base64 have thirty."""
_URI = re.compile(r"\bdata:[\w.+-]{1,64}/[\w.+-]{1,64}(?:;[\w.=-]{1,64}){0,8},\S*")
_BASE64_RUN = re.compile(rf"[A-Za-z0-9+/=_-]{{{MIN_RUN},}}")
_HEXADECIMAL = re.compile(r"(?:0x)?[0-9a-fA-F-]+")
_PART = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|[0-9]+")
_SEPARATOR = re.compile(r"[+/_-]")
_WORD_BOUNDARY = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|[_-]+|\s+")

UNSPACED = "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\u9fff\uac00-\ud7af\uf900-\ufaff]"
"""Pattern of a character of a script without spaces: Thai, Lao, Burmese, Khmer, Chinese, Japanese, Korean."""


def split_identifier(text: str) -> list[str]:
    """Return the words that an identifier, in camel case, snake case or with hyphens, is made of."""
    return [word for word in _WORD_BOUNDARY.split(text) if word]


def without_data(text: str) -> str:
    """Return a text without data URIs and without long runs of base64 characters that are not made of words."""
    return _BASE64_RUN.sub(lambda run: " " if _is_data(run[0]) else run[0], _URI.sub(" ", text)).strip()


def _is_data(run: str) -> bool:
    if _HEXADECIMAL.fullmatch(run):
        return True
    lengths = [len(part) for part in _PART.findall(run)]
    if not lengths or max(lengths) > LONGEST_WORD:
        return True
    segments = len(_SEPARATOR.findall(run)) + 1
    return len(run) + 1 >= (_MAX_SEGMENT + 1) * segments and sum(lengths) < _MIN_PART * len(lengths)


MAX_TEXT = 20_000
"""Characters of one text that are analyzed."""
MAX_LENGTH = 40
"""Characters of a word; longer ones are truncated, since they are data rather than language."""


def analyze(text: str) -> list[str]:
    """Return the index terms of the first :data:`MAX_TEXT` characters of a text, in their order.

    They are folded to lower case without accents; English ones are stemmed, and stop words are removed, unless there
    is nothing else. An identifier becomes the words it is made of; a short one, and one with any of ``+#.@/``, is also
    a term as it is written. Scripts without spaces become bigrams. Data such as base64 is left out.
    """
    return [_stem(token) for token in _telling(text)]


def spell(text: str) -> dict[str, str]:
    """Return the index terms of a text, each with the word that it was made of, folded as the term is."""
    return {_stem(token): token for token in _telling(text)}


def _telling(text: str) -> list[str]:
    text = without_data(text)[:MAX_TEXT]
    telling = text
    if not text.isascii():
        text = _normalize(text)
        telling = _UNSPACED_STOP_WORDS.sub(" ", text)
    return [token for token in _tokenize(telling) if token not in _STOP_WORDS] or _tokenize(text)


_MARKS = "".join(chr(code) for code in range(0x300, 0x10000) if unicodedata.category(chr(code)) in {"Mn", "Mc"})
_SPELLING = re.compile(rf"[@.]?\w[\w{_MARKS}-]*(?:[+#.@/]+(?:\w[\w{_MARKS}-]*)?)*")
"""What is written without a space: a word, or ``C++``, ``node.js``, ``@scope/name``, and the end of a sentence."""
_RUN = re.compile(rf"\w[\w{_MARKS}-]*(?:[+#]+(?!\w))?")
"""A word, or several that form one identifier; with the signs that end it."""
_CONTRACTION = re.compile(r"['’](?:s|t|d|m|re|ve|ll)\b", re.IGNORECASE)
_UNSPACED = re.compile(f"({UNSPACED}+)")
_SCRIPT_RUN = re.compile(
    "[^\u3040-\u30ff]+(?![のはがをにでともへや])[\u3040-\u309f]?|[^\u3040-\u30ff]+|[\u3040-\u309f]+|[\u30a0-\u30ff]+"
)
"""Japanese changes its script between words: kanji with the first kana of its ending, hiragana, or katakana."""
_ACCENTS = re.compile("[\u0300-\u036f]+")
_CHUNK = 256
"""Characters normalized at once."""
MAX_JOINED = 3
"""Words of an identifier that is also a term as a whole."""


def _tokenize(text: str) -> list[str]:
    tokens: list[str] = []
    for spelling in _SPELLING.findall(_CONTRACTION.sub("", text)):
        if spelling.isascii() and spelling.isalnum() and spelling[1:] == spelling[1:].lower():
            # A plain word, which may begin with a capital letter.
            tokens.append(spelling[:MAX_LENGTH].lower())
            continue
        runs = _RUN.findall(spelling)
        written = spelling.rstrip("./@")
        if len(written) <= MAX_LENGTH and written != runs[0] and not written.isalnum():
            tokens.append(_fold(written))
        for run in runs:
            tokens += _split_run(run)
    # Folding leaves nothing of an accent without a letter.
    return [token for token in tokens if token]


def _split_run(run: str) -> list[str]:
    tokens: list[str] = []
    word = run.rstrip("+#")
    if word != run:
        tokens.append(_fold(run))
        if len(word) == 1:
            # "C++" and "C#" are no kinds of "C".
            return tokens
    parts = split_identifier(word)
    if 1 < len(parts) <= MAX_JOINED:
        tokens.append(_fold("".join(parts)))
    for part in parts:
        if part.isascii():
            tokens.append(part.lower()[:MAX_LENGTH])
            continue
        for place, piece in enumerate(_UNSPACED.split(part)):
            if place % 2:
                tokens += _bigrams(piece)
            elif piece:
                tokens.append(_fold(piece))
    return tokens


def _bigrams(text: str) -> list[str]:
    return [
        word[start : start + 2]
        for word in _SCRIPT_RUN.findall(text)
        # One kana between two words is a particle or an ending.
        if len(word) > 1 or word == text or not "\u3040" <= word <= "\u30ff"
        for start in range(max(1, len(word) - 1))
    ]


def _normalize(text: str) -> str:
    """Return a text in Unicode form NFKC, truncated to :data:`MAX_TEXT` characters."""
    # In pieces: ordering combining characters is quadratic, thousands in a row would take a second.
    pieces = (unicodedata.normalize("NFKC", text[at : at + _CHUNK]) for at in range(0, len(text), _CHUNK))
    return "".join(pieces)[:MAX_TEXT]


def _fold(word: str) -> str:
    if word.isascii():
        return word.lower()[:MAX_LENGTH]
    bare = _ACCENTS.sub("", unicodedata.normalize("NFD", word[:_CHUNK].casefold()))
    return unicodedata.normalize("NFC", bare)[:MAX_LENGTH]


_stemmers = threading.local()


@lru_cache(maxsize=50_000)
def _stem(word: str) -> str:
    # A stemmer has a buffer that two threads must not share.
    if not hasattr(_stemmers, "english"):
        _stemmers.english = Stemmer.Stemmer("english", 0)
    stemmed: str = _stemmers.english.stemWord(word)
    return stemmed


_STOP_WORDS = frozenset(
    """
    a about after all also am an and any are as at be because been before being both but by can could did do does
    doing don during each either else few for from further had has have having he her here hers herself him himself his
    how i if in into is it its itself just me more most my myself neither no nor not of off on once only or other our
    ours ourselves out over own same shall she should so some such than that the their theirs them themselves then there
    these they this those through to too under until up upon us very was we were what when where which while who whom
    whose why will with would you your yours yourself yourselves
    d s t aren couldn didn doesn hadn hasn haven isn shouldn wasn weren won wouldn
    able assist give hello help hey hi know let like look looking need needs please provide show tell thank thanks want
    wants
    """.split()  # noqa: SIM905
)
"""English function words, and words by which people ask for something."""

_UNSPACED_STOP_WORDS = re.compile(
    "|".join(
        sorted(
            """
            お願いいたします お願いします おねがいします 教えてください 教えて おしえて 調べてください 調べて しらべて
            探してください 探して さがして 見つけて 見せて 知りたい しりたい 手伝って 助けて してください てください
            でください ください 下さい てほしい 欲しい ほしい もらえますか もらえる いただけますか くれますか
            できますか できる したいのですが たいのですが のですが したいです したい たいです どうすれば どうやって
            どのように について に関する に関して に対して のための のために ための ために として という といった
            などの など ありますか ありません あります でしょうか でしょう ですか です ですが ました ません ます
            している しています します する 请帮我查 请帮我找 帮我查 帮我找 查一下 找一下 请帮我 请问 请给我 帮我 给我
            我想要 我想 我要 我需要 需要 想要 可以吗 能不能 可以 怎么样 怎么 如何 什么时候 什么 哪些 哪个 哪里 为什么
            多少 一下 一个 这个 那个 我们 你们 他们 的 了 吗 呢 吧 啊 请 我 你 您 和 與 与 或 是 在 有 把 被
            알려주세요 알려줘 찾아주세요 찾아줘 도와주세요 도와줘 보여주세요 보여줘 해주세요 해줘 주세요 하고 싶어요
            싶어요 싶습니다 어떻게 무엇을 어디서 언제 합니다 입니다 습니다 있나요 인가요 ช่วย หน่อย กรุณา โปรด ต้องการ
            อยากจะ อยาก ครับ ค่ะ คะ ฉัน ผม ให้ ที่ และ หรือ ของ เป็น อย่างไร ยังไง อะไร ไหม ได้
            """.split(),  # noqa: SIM905
            key=len,
            reverse=True,
        )
    )
    # Particles of Japanese between two words that are not written in hiragana.
    + r"|を|(?<=[\u30a0-\u30ff\u4e00-\u9fff])[のはがにでともへや](?=[\u30a0-\u30ff\u4e00-\u9fff]|$)"
    + r"|(?<![\u3040-\u309f])(?:この|その|あの|どの|どれ|どこ|いつ|だれ|なに|から|まで|より|こと|もの)"
    + r"|の(?=[\u30a0-\u30ff\u4e00-\u9fff])"
)
"""The same of Japanese, Chinese, Korean and Thai: bigrams of these words would be rare, and so outrank the noun."""


MAX_PARTS = 12
"""Each part is one more text to encode and search by; further parts count only in the whole request."""
MAX_REQUEST = 8192
"""Characters of a request that are read; a longer one is truncated, not refused."""

_MIN_WORDS = 3
"""Words of a part; a shorter sentence, such as a greeting, joins the one before it."""
_END = re.compile(
    r"[.!?;…؟।]{1,4}[\"'”’»)\]]{0,3}(?=\s)"  # There is no space in 3.5, example.org, or v1.2.
    r"|[。！？；][”」』）]?"
    r"|[\r\n]+"
)
_MARK = re.compile(r"^(?:[-*•–]|\(?\d{1,2}[.)])\s+")
"""The bullet or number before a list item."""
_SHORTENED = re.compile(
    r"(?:^|[\s(.])(?:[^\W\d_]|approx|cf|co|corp|dr|est|etc|fig|inc|jr|ltd|mr|mrs|ms|no|prof|sr|st|vs)\.$"
    r"|^\s*\(?\d{1,2}\.$",
    re.IGNORECASE,
)
"""A full stop that ends no sentence, as in "e.g.", "U.S.", "Dr.", or after the number of a list item."""
_WORD = re.compile(r"\w+")
_UNSPACED_CHARACTER = re.compile(UNSPACED)
"""Each of these characters counts as a word."""


def search_texts(request: str) -> list[str]:
    """Return the texts to search a request by: the whole, without data such as base64, then its parts."""
    request = request[:MAX_REQUEST]
    whole = without_data(request) or request
    return [whole, *split_request(whole)]


def split_request(request: str) -> list[str]:
    """Return the first ``MAX_PARTS`` sentences and list items of a request; none when there is only one."""
    sentences = _sentences(request[:MAX_REQUEST])
    if len(sentences) < 2:
        return []
    found: list[str] = []
    begun = ""
    for sentence in sentences:
        if found and _length(sentence) < _MIN_WORDS:
            found[-1] += f" {sentence}"
        elif _length(begun + sentence) < _MIN_WORDS:
            begun += f"{sentence} "
        else:
            found.append(begun + sentence)
            begun = ""
    return found[:MAX_PARTS] if len(found) > 1 else []


def _sentences(text: str) -> list[str]:
    pieces = []
    start = 0
    for end in _END.finditer(text):
        if not _SHORTENED.search(text[max(start, end.end() - 8) : end.end()]):
            pieces.append(text[start : end.end()])
            start = end.end()
    pieces.append(text[start:])
    sentences = (_MARK.sub("", piece.strip(), count=1) for piece in pieces)
    return [sentence for sentence in sentences if _WORD.search(sentence)]


def _length(text: str) -> int:
    return len(_WORD.findall(text)) + len(_UNSPACED_CHARACTER.findall(text))
