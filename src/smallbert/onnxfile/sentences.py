"""Sentences of our own, of many lengths and some languages, that an exported file is tried out on."""

SENTENCES = (
    "",
    "Why?",
    "No comment.",
    "A lovely film.",
    "Well, that was quick!",
    "The story was rather slow.",
    "It costs 12.50 euros (or so).",
    "She said: 'Not in this weather!'",
    "I have never seen a worse play than this one.",
    "Nobody had told her that the bridge was closed.",
    "Two men carry a piano up the stairs while a third one watches.",
    "Write to ines.okafor@example.org, or call 0171 555-0199 after 6 p.m.",
    "The committee met on 3 March 1987, argued until midnight, and decided nothing at all.",
    "Water boils at 100 °C at sea level, but at about 71 °C on top of the highest mountain.",
    "who won the cup in the year before the war",
    "best cheap headphones for running 2021 review",
    "def add(a, b): return a + b",
    "THE SALE ENDS TODAY!!! EVERYTHING MUST GO!!!",
    "lol idk tbh, u shd ask him urself :-)",
    "The old man the boats, and the horse raced past the barn fell.",
    "Not bad, not bad at all; though I would not say that it was good, either.",
    "If you had come earlier, which I do not blame you for not having done, you would have met the whole family.",
    "Enzymes that cut proteins are made as longer chains that do nothing until a piece of them is taken away.",
    "The defendant, having been duly summoned, did not appear; the court therefore ruled in his absence.",
    "Profits fell by 4.2 percent to 310 million dollars, while costs for energy and freight rose for the third year.",
    "Is the knee swollen, and does it hurt when you bend it or only when you put weight on it?",
    "Add the flour, stir until nothing sticks to the bowl, cover it with a cloth and let it rest for an hour.",
    "A child in a yellow coat jumps over a puddle.",
    "Nobody is swimming in the lake.",
    "Der Zug nach Köln fällt heute leider aus.",
    "Wir haben uns lange nicht gesehen, obwohl wir in derselben Straße wohnen und oft denselben Bus nehmen.",
    "Où est la gare, s'il vous plaît ?",
    "Le chat dort sur le toit depuis que le soleil s'est levé, et personne n'ose le réveiller.",
    "Mañana no habrá clase porque el profesor está enfermo.",
    "Ieri sera abbiamo mangiato troppo, ma ne è valsa la pena.",
    "Onde fica a farmácia mais próxima?",
    "De winkel is op zondag gesloten.",
    "Wczoraj padał śnieg, a dzisiaj świeci słońce.",
    "Завтра мы поедем на дачу, если не будет дождя.",
    "Όλο το πρωί η θάλασσα ήταν ήρεμη.",
    "Bugün hava çok güzel, parka gidelim mi?",
    "كتب الطالب رسالة طويلة إلى صديقه.",
    "कल बारिश होगी, इसलिए छाता ले जाना।",
    "今日はとても暑いので、川へ泳ぎに行きました。",
    "这家饭馆的菜又便宜又好吃。",
    "오늘은 도서관에서 책을 세 권 빌렸습니다.",
    "She moved from Łódź to São Paulo in 2009 (a naïve decision, she says) but the best of her life.",
    "\U0001f600 great service \U0001f44d\U0001f44d, will come again",
    "a a a a a a a a a a a a a a a a a a a a a a a a a a a a a a a a",
    "Between the two houses runs a path that nobody has mown for years; foxes use it at night, children by day, and in "
    "spring, when the brook is high, it stands under water for a week or two, so that the postman has to walk around.",
)


def varied_texts(count: int) -> list[str]:
    """So many different texts and no fewer than there are sentences: each alone, then ever more of them in a row."""
    texts = list(SENTENCES)
    while len(texts) < count:
        many = 2 + (len(texts) - len(SENTENCES)) * 2
        texts.append(" ".join(SENTENCES[(many + step) % len(SENTENCES)] for step in range(many)))
    return texts
