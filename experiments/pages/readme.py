# SPDX-License-Identifier: Apache-2.0
"""The parts of a README that come from committed results."""

from collections.abc import Sequence
import re


def fill(text: str, place: str, content: str) -> str:
  """`text` with `content` between its two comments.

  Args:
    text: with `<!-- place: the command that fills it -->` and, further down,
      `<!-- /place -->`.
    place: one word.
    content: what belongs between the two.

  Raises:
    ValueError: there is no such place.
  """
  comments = re.compile(
    rf"(<!-- {place}: [^>]* -->\n)(.*?)(<!-- /{place} -->)", re.DOTALL
  )
  if not comments.search(text):
    raise ValueError(f"no `<!-- {place}: ... -->` to fill in this text")
  return comments.sub(lambda m: f"{m[1]}\n{content.strip()}\n\n{m[3]}", text)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  """A Markdown table."""
  lines = [header, ["---"] * len(header), *rows]
  return "\n".join(f"| {' | '.join(line)} |" for line in lines)
