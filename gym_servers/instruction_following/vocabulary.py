"""Word lists of the checks: function words, verbs, and the names that IFBench's instructions spell out."""

import re


def _set(text: str) -> frozenset[str]:
    return frozenset(text.split())


CONJUNCTIONS = _set("and but for nor or so yet")
SMALL = _set("a an and as at but by for from if in into of on or over the to with")  # in titles
PRONOUNS = _set(
    "i me my mine myself you your yours yourself yourselves he him his himself she her hers herself it its itself we us "
    "our ours ourselves they them their theirs themselves this that these those who whom whose which what whoever "
    "whomever whatever whichever anybody anyone anything everybody everyone everything nobody nothing somebody someone "
    "something each either neither both all some any none one another others"
)
STOP_WORDS = PRONOUNS.difference(["one", "another", "others", "everything", "something", "nothing"]) | _set(
    "a an the and but or nor if because as until while so than of at by for with about against between into through "
    "during before after above below to from up down in out on off over under again further then once here there when "
    "where why how few more most other such no not only own same too very just now am is are was were be been being "
    "have has had having do does did doing can will should would could must may might shall don't doesn't didn't isn't "
    "aren't wasn't weren't won't can't couldn't shouldn't wouldn't haven't hasn't hadn't it's i'm i've i'll i'd you're "
    "you've you'll he's she's we're we've they're that's there's"
)
NAMES = _set(
    "Emma Liam Sophia Jackson Olivia Noah Ava Lucas Isabella Mason Mia Ethan Charlotte Alexander Amelia Benjamin Harper "
    "Leo Zoe Daniel Chloe Samuel Lily Matthew Grace Owen Abigail Gabriel Ella Jacob Scarlett Nathan Victoria Elijah "
    "Layla Nicholas Audrey David Hannah Christopher Penelope Thomas Nora Andrew Aria Joseph Claire Ryan Stella "
    "Jonathan"
)
AFRICA = _set(
    "algeria angola benin botswana burkina burundi verde cameroon central chad comoros congo djibouti egypt equatorial "
    "eritrea eswatini ethiopia gabon gambia ghana guinea ivoire ivory kenya lesotho liberia libya madagascar malawi mali "
    "mauritania mauritius morocco mozambique namibia niger nigeria rwanda sao senegal seychelles sierra somalia south "
    "sudan swaziland tanzania togo tunisia uganda zambia zimbabwe"
)
CAPITALS = [  # of European countries north of 45 degrees, from north to south
    "Reykjavik", "Helsinki", "Oslo", "Tallinn", "Stockholm", "Riga", "Moscow", "Copenhagen", "Vilnius", "Minsk", "Dublin", "Berlin", "Amsterdam", "Warsaw", "London", "Brussels", "Prague", "Luxembourg", "Paris", "Vienna", "Bratislava", "Budapest", "Vaduz", "Chisinau", "Bern", "Ljubljana", "Zagreb"
]  # fmt: skip

_VERBS = _set(
    "accept achieve act adapt add adjust adopt advance agree aim allow analyse analyze announce answer apply approach "
    "argue arrange arrive ask assemble assess assign assume attach attempt attend avoid bake balance base become beg "
    "behold believe belong bend blend boil book borrow bounce break breathe bring browse brush build burn buy calculate "
    "call calm carry catch celebrate challenge change charge check cheer choose chop claim clean clear click climb close "
    "collect combine come commit communicate compare compile complete compose compute concentrate conduct confirm "
    "connect consider consist construct consult consume contact contain continue contribute convert convince cook copy "
    "count cover craft create cross cry cultivate cut dance dare deal decide declare decorate deepen define delete "
    "deliver demand demonstrate depend describe design desire determine develop dig discover discuss display distribute "
    "dive divide double download draft drag draw dream dress drink drive drop dry earn eat edit embark embrace emerge "
    "employ empower enable encourage end engage enhance enjoy enrich ensure enter establish estimate evaluate examine "
    "exclude excuse execute exercise exist expand expect experience experiment explain explore express extend extract "
    "face fade fail fall feature feed feel fetch fight fill filter find finish fit fix flip float fly focus fold follow "
    "forget forgive form format foster gather generate get gain give glance go grab grant grasp greet grill grow guess "
    "guide handle hang happen hear heat help hide highlight hike hold hope host hug hurry identify ignore imagine "
    "implement improve include incorporate increase inform insert insist inspect inspire install integrate introduce "
    "invent invest investigate invite involve iterate join judge jump justify keep kick know label land laugh launch lay "
    "lead leap learn leave let lift like limit link list listen live load locate look lose love lower maintain make "
    "manage mark master match mean measure meditate meet melt mention merge mind minimize mix modify monitor move name "
    "navigate need note notice obey observe obtain offer open operate optimize order organize outline overcome pack paint "
    "participate pass pause pay perform permit persist pick picture place plan plant play plug point ponder pour practice "
    "praise prefer prepare present preserve press prevent print proceed process produce program promise promote propose "
    "protect prove provide publish pull purchase push put question quit raise reach read realize rebuild recall receive "
    "recognize recommend record reduce refer reflect refuse regard relax release remain remember remind remove rename "
    "repair repeat replace reply report represent request require research reserve resist resolve respect respond rest "
    "restore retrieve return reveal review revise rewrite rinse rise roast roll rotate run save say schedule search seat "
    "secure see seek seem select sell send separate serve set settle shake share shift shine shop shout show shut sign "
    "simmer simplify simulate sing sip sit sketch skip sleep slice slide smell smile solve sort speak specify spend spin "
    "split spray spread sprinkle stand start state stay step stick stir stop store strengthen stretch strike strive "
    "structure struggle study submit succeed suggest summarize supply support suppose surround survive swim switch tackle "
    "take talk taste teach tear tell thank think throw tie touch track trade train transform translate transport travel "
    "treat trust try turn type uncover understand unite unleash unlock update upgrade upload use utilize validate verify "
    "view visit visualize wait wake walk want warm warn wash watch wear weigh welcome whisk win wish witness wonder work "
    "worry wrap write yield"
)
_FORMS = _set(  # auxiliaries, contracted or not, and irregular forms
    "am is are was were be been being have has had do does did done can could will would shall should may might must "
    "isn't aren't wasn't weren't don't doesn't didn't haven't hasn't can't couldn't won't wouldn't shouldn't let's became "
    "began begun bent bought broke brought built came caught chose chosen cut drawn drew driven drove ate eaten fallen "
    "felt fell fed flew fought found given gave gone gotten got grown grew heard held hid kept knew known laid led left "
    "lost made meant met paid put ran read rose said sang sat saw seen sent shot shown slept sold spent spoke stood "
    "stuck taken taught thought threw told took understood went woke won wore written wrote"
)


def is_verb(word: str) -> bool:
    """Whether a word can be a verb: a common one, or a form of it (`-s`, `-ed`, `-ing`)."""
    word = word.casefold().replace("\u2019", "'")
    if word in _FORMS or word in _VERBS:
        return True
    for ending in ("s", "es", "d", "ed", "ing"):
        stem = word.removesuffix(ending)
        stems = (stem, f"{stem}e", stem[:-1] if stem[-2:-1] == stem[-1:] else stem, re.sub("i$", "y", stem))
        if stem != word and any(form in _VERBS for form in stems):
            return True
    return False


def syllables(word: str) -> int:
    """An estimate for English: groups of vowels, without a silent `e` at the end (`-e`, `-es`, `-ed`)."""
    letters = re.sub(r"[^a-z]", "", word.casefold())
    count = len(re.findall(r"[aeiouy]+", letters)) + len(re.findall(r"i[ao](?!us|n)|eo(?!us)|[^aeiou]ism$", letters))
    if re.search(r"[^aeiouyl]e$|[aeiou]le$|[^aeioutdscxz]es$|[^aeioutd]ed$", letters):
        count -= 1
    return max(count, 1)
