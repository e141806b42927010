"""What a tuning asks where no prompts are given: a few requests of every kind that devices get."""

from __future__ import annotations

from specedge.runtime.prompts import Prompt

__all__ = ["TUNING_PROMPTS"]

_TEXTS = (
    ("writing", "Write a short letter to a neighbour who watered the plants during the holidays."),
    ("coding", "Write a Python function that counts how often each word stands in a text."),
    ("maths", "A shop sells pens at 3 euros and notebooks at 5 euros. Ana buys 4 pens and 2 notebooks and pays with "
              "a 50 euro note. How much change does she get? Explain each step."),
    ("translation", "Translate German to English: Der Zug nach Hamburg fährt heute wegen einer Baustelle "
                    "zwanzig Minuten später ab."),
    ("summarization", "Summarize: The harbour town has built a new ferry terminal. For years passengers had waited in "
                      "a tent, which storms blew away twice. The terminal has heated halls, a small cafe and a pier "
                      "that floats, so that ships can land at low tide. It cost nine million euros, two more than "
                      "planned, because the old pier's posts had to be replaced as well. The first ferry leaves "
                      "on Monday."),
    ("qa", "Which planet of the solar system has the most moons?"),
    ("rag", "The lighthouse of Saint Brigid was built in 1847 and rebuilt after the fire of 1902. Since 1988 its lamp "
            "is run by a computer, and the keeper's house is a museum with a collection of sea charts.\n"
            "When was the lighthouse rebuilt?"),
    ("extraction", "List the names and the cities in this text, one a line: Maria from Porto met Jens from Aarhus and "
                   "Chiara from Bologna at the airport."),
    ("robotics", "A robot has to bring a cup from the kitchen to the desk. Give the steps as a numbered list."),
    ("reasoning", "If all the lamps in a house are off and one of them is warm, what can you say about it?"),
)  # fmt: skip

TUNING_PROMPTS = tuple(Prompt(f"tuning-{number}", kind, text) for number, (kind, text) in enumerate(_TEXTS))
