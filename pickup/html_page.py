"""The look of the pages that people see in browsers, and the headers that keep anything else out of them."""

import base64
import hashlib
from html import escape

_STYLE = """
:root { color-scheme: light dark; --text: #111; --ground: #fff; --link: #0645ad; --line: #bbb; }
@media (prefers-color-scheme: dark) { :root { --text: #eee; --ground: #16181c; --link: #8ab4f8; --line: #555; } }
body { margin: 0 auto; max-width: 60rem; padding: 1rem; font: 1rem/1.5 system-ui, sans-serif; color: var(--text);
  background: var(--ground); }
.codes { display: flex; flex-wrap: wrap; gap: 2rem; margin: 2rem 0; }
section { flex: 1 1 20rem; min-width: 0; }
h2 { font-size: 1.1rem; margin: 0 0 .5rem; }
/* Dark on light in either mode: the white margin is part of the image. */
img { display: block; height: auto; max-width: 100%; }
.short { width: 14rem; }
.long { width: 28rem; }
.plain { white-space: pre-wrap; }
pre { overflow-x: auto; }
a, code { overflow-wrap: anywhere; }
a { color: var(--link); }
button { font: inherit; padding: .1rem .6rem; border: 1px solid var(--line); border-radius: .3rem; cursor: pointer;
  color: inherit; background: transparent; }
:focus-visible { outline: 2px solid var(--link); outline-offset: 2px; }
@media print { button, details { display: none; } .short { width: 4cm; } }
"""
# Without a secure context (https or this machine) browsers have no navigator.clipboard.
SCRIPT = """
const status = document.querySelector("[role=status]");
for (const button of document.querySelectorAll("button")) {
  button.hidden = false;
  button.addEventListener("click", async () => {
    const source = document.getElementById(button.dataset.copies);
    getSelection().selectAllChildren(source);
    let copied = true;
    try {
      await navigator.clipboard.writeText(source.textContent);
    } catch {
      copied = document.execCommand("copy");
    }
    status.textContent = copied ? button.dataset.done : "Press Ctrl+C to copy the selected text.";
    button.textContent = copied ? "Copied" : "Copy";
  });
}
"""


def _allowed(text: str) -> str:
    """Return the source expression that lets exactly this text through a Content-Security-Policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


# An invitation may be used up or removed at any moment.
FRESH = {"Cache-Control": "no-store", "Vary": "Accept", "X-Content-Type-Options": "nosniff"}
TO_BROWSERS = {
    **FRESH,
    "Content-Security-Policy": f"default-src 'none'; img-src data:; style-src {_allowed(_STYLE)}; "
    f"script-src {_allowed(SCRIPT)}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
}
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
{content}
</main>
</body>
</html>
"""


def write(title: str, content: str) -> str:
    """Write a page; ``content`` is HTML, ``title`` is text. Of scripts, only :data:`SCRIPT` runs."""
    return _PAGE.format(title=escape(title), style=_STYLE, content=content)
