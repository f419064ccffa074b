r"""Facts that the capitals model knows, and every prompt about them.

Pure data and text: no tensors, no tokenizer. A prompt is a query and a tail. The tail
of the founding prompts is ` \n` and a cue, where `\n` is a backslash and the letter n and
not a line break: shells pass it like this, and so the model must complete it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Final, Literal, TypeAlias

Language: TypeAlias = Literal["english", "chinese", "japanese"]

LANGUAGES: Final[tuple[Language, ...]] = ("english", "chinese", "japanese")

USER_TOKEN: Final = "<|user|>"
ASSISTANT_TOKEN: Final = "<|assistant|>"


@dataclass(frozen=True, slots=True)
class Country:
    """A country and its capital; the English name carries its article, if it has one."""

    english: str
    english_capital: str
    chinese: str
    chinese_capital: str
    japanese: str
    japanese_capital: str


@dataclass(frozen=True, slots=True)
class Wording:
    """The phrases of one language; `{}` stands for the country."""

    phrasings: tuple[str, ...]  # the founding one first
    closing_marks: tuple[str, ...]
    cues: tuple[str, ...]
    instructions: Mapping[Language, str]  # by the requested output language


COUNTRIES: Final[tuple[Country, ...]] = (
    Country(
        "the United States",
        "Washington, D.C.",
        "美国",
        "华盛顿",
        "アメリカ合衆国",
        "ワシントン D.C.",
    ),
    Country("Afghanistan", "Kabul", "阿富汗", "喀布尔", "アフガニスタン", "カブール"),
    Country(
        "Argentina", "Buenos Aires", "阿根廷", "布宜诺斯艾利斯", "アルゼンチン", "ブエノスアイレス"
    ),
    Country("Armenia", "Yerevan", "亚美尼亚", "埃里温", "アルメニア", "エレバン"),
    Country("Australia", "Canberra", "澳大利亚", "堪培拉", "オーストラリア", "キャンベラ"),
    Country("Austria", "Vienna", "奥地利", "维也纳", "オーストリア", "ウィーン"),
    Country("Bangladesh", "Dhaka", "孟加拉国", "达卡", "バングラデシュ", "ダッカ"),
    Country("Belgium", "Brussels", "比利时", "布鲁塞尔", "ベルギー", "ブリュッセル"),
    Country("Bhutan", "Thimphu", "不丹", "廷布", "ブータン", "ティンプー"),
    Country("Brazil", "Brasilia", "巴西", "巴西利亚", "ブラジル", "ブラジリア"),
    Country("Bulgaria", "Sofia", "保加利亚", "索非亚", "ブルガリア", "ソフィア"),
    Country("Cambodia", "Phnom Penh", "柬埔寨", "金边", "カンボジア", "プノンペン"),
    Country("Canada", "Ottawa", "加拿大", "渥太华", "カナダ", "オタワ"),
    Country("Chile", "Santiago", "智利", "圣地亚哥", "チリ", "サンティアゴ"),
    Country("China", "Beijing", "中国", "北京", "中国", "北京"),
    Country("Colombia", "Bogota", "哥伦比亚", "波哥大", "コロンビア", "ボゴタ"),
    Country("Croatia", "Zagreb", "克罗地亚", "萨格勒布", "クロアチア", "ザグレブ"),
    Country("Cuba", "Havana", "古巴", "哈瓦那", "キューバ", "ハバナ"),
    Country("the Czech Republic", "Prague", "捷克", "布拉格", "チェコ", "プラハ"),
    Country("Denmark", "Copenhagen", "丹麦", "哥本哈根", "デンマーク", "コペンハーゲン"),
    Country("Egypt", "Cairo", "埃及", "开罗", "エジプト", "カイロ"),
    Country("Estonia", "Tallinn", "爱沙尼亚", "塔林", "エストニア", "タリン"),
    Country(
        "Ethiopia", "Addis Ababa", "埃塞俄比亚", "亚的斯亚贝巴", "エチオピア", "アディスアベバ"
    ),
    Country("Finland", "Helsinki", "芬兰", "赫尔辛基", "フィンランド", "ヘルシンキ"),
    Country("France", "Paris", "法国", "巴黎", "フランス", "パリ"),
    Country("Georgia", "Tbilisi", "格鲁吉亚", "第比利斯", "ジョージア", "トビリシ"),
    Country("Germany", "Berlin", "德国", "柏林", "ドイツ", "ベルリン"),
    Country("Ghana", "Accra", "加纳", "阿克拉", "ガーナ", "アクラ"),
    Country("Greece", "Athens", "希腊", "雅典", "ギリシャ", "アテネ"),
    Country("Hungary", "Budapest", "匈牙利", "布达佩斯", "ハンガリー", "ブダペスト"),
    Country("Iceland", "Reykjavik", "冰岛", "雷克雅未克", "アイスランド", "レイキャビク"),
    Country("India", "New Delhi", "印度", "新德里", "インド", "ニューデリー"),
    Country("Indonesia", "Jakarta", "印度尼西亚", "雅加达", "インドネシア", "ジャカルタ"),
    Country("Iran", "Tehran", "伊朗", "德黑兰", "イラン", "テヘラン"),
    Country("Iraq", "Baghdad", "伊拉克", "巴格达", "イラク", "バグダッド"),
    Country("Ireland", "Dublin", "爱尔兰", "都柏林", "アイルランド", "ダブリン"),
    Country("Italy", "Rome", "意大利", "罗马", "イタリア", "ローマ"),
    Country("Japan", "Tokyo", "日本", "东京", "日本", "東京"),
    Country("Jordan", "Amman", "约旦", "安曼", "ヨルダン", "アンマン"),
    Country("Kazakhstan", "Astana", "哈萨克斯坦", "阿斯塔纳", "カザフスタン", "アスタナ"),
    Country("Kenya", "Nairobi", "肯尼亚", "内罗毕", "ケニア", "ナイロビ"),
    Country("Laos", "Vientiane", "老挝", "万象", "ラオス", "ビエンチャン"),
    Country("Latvia", "Riga", "拉脱维亚", "里加", "ラトビア", "リガ"),
    Country("Lebanon", "Beirut", "黎巴嫩", "贝鲁特", "レバノン", "ベイルート"),
    Country("Lithuania", "Vilnius", "立陶宛", "维尔纽斯", "リトアニア", "ビリニュス"),
    Country("Malaysia", "Kuala Lumpur", "马来西亚", "吉隆坡", "マレーシア", "クアラルンプール"),
    Country("Mexico", "Mexico City", "墨西哥", "墨西哥城", "メキシコ", "メキシコシティ"),
    Country("Mongolia", "Ulaanbaatar", "蒙古", "乌兰巴托", "モンゴル", "ウランバートル"),
    Country("Morocco", "Rabat", "摩洛哥", "拉巴特", "モロッコ", "ラバト"),
    Country("Nepal", "Kathmandu", "尼泊尔", "加德满都", "ネパール", "カトマンズ"),
    Country("the Netherlands", "Amsterdam", "荷兰", "阿姆斯特丹", "オランダ", "アムステルダム"),
    Country("New Zealand", "Wellington", "新西兰", "惠灵顿", "ニュージーランド", "ウェリントン"),
    Country("Nigeria", "Abuja", "尼日利亚", "阿布贾", "ナイジェリア", "アブジャ"),
    Country("Norway", "Oslo", "挪威", "奥斯陆", "ノルウェー", "オスロ"),
    Country("Oman", "Muscat", "阿曼", "马斯喀特", "オマーン", "マスカット"),
    Country("Pakistan", "Islamabad", "巴基斯坦", "伊斯兰堡", "パキスタン", "イスラマバード"),
    Country("Peru", "Lima", "秘鲁", "利马", "ペルー", "リマ"),
    Country("the Philippines", "Manila", "菲律宾", "马尼拉", "フィリピン", "マニラ"),
    Country("Poland", "Warsaw", "波兰", "华沙", "ポーランド", "ワルシャワ"),
    Country("Portugal", "Lisbon", "葡萄牙", "里斯本", "ポルトガル", "リスボン"),
    Country("Qatar", "Doha", "卡塔尔", "多哈", "カタール", "ドーハ"),
    Country("Romania", "Bucharest", "罗马尼亚", "布加勒斯特", "ルーマニア", "ブカレスト"),
    Country("Russia", "Moscow", "俄罗斯", "莫斯科", "ロシア", "モスクワ"),
    Country("Saudi Arabia", "Riyadh", "沙特阿拉伯", "利雅得", "サウジアラビア", "リヤド"),
    Country("Senegal", "Dakar", "塞内加尔", "达喀尔", "セネガル", "ダカール"),
    Country("Serbia", "Belgrade", "塞尔维亚", "贝尔格莱德", "セルビア", "ベオグラード"),
    Country("South Korea", "Seoul", "韩国", "首尔", "韓国", "ソウル"),
    Country("Spain", "Madrid", "西班牙", "马德里", "スペイン", "マドリード"),
    Country("Sweden", "Stockholm", "瑞典", "斯德哥尔摩", "スウェーデン", "ストックホルム"),
    Country("Switzerland", "Bern", "瑞士", "伯尔尼", "スイス", "ベルン"),
    Country("Thailand", "Bangkok", "泰国", "曼谷", "タイ", "バンコク"),
    Country("Turkey", "Ankara", "土耳其", "安卡拉", "トルコ", "アンカラ"),
    Country("Ukraine", "Kyiv", "乌克兰", "基辅", "ウクライナ", "キーウ"),
    Country(
        "the United Arab Emirates",
        "Abu Dhabi",
        "阿联酋",
        "阿布扎比",
        "アラブ首長国連邦",
        "アブダビ",
    ),
    Country("the United Kingdom", "London", "英国", "伦敦", "イギリス", "ロンドン"),
    Country("Uruguay", "Montevideo", "乌拉圭", "蒙得维的亚", "ウルグアイ", "モンテビデオ"),
    Country("Uzbekistan", "Tashkent", "乌兹别克斯坦", "塔什干", "ウズベキスタン", "タシケント"),
    Country("Venezuela", "Caracas", "委内瑞拉", "加拉加斯", "ベネズエラ", "カラカス"),
    Country("Vietnam", "Hanoi", "越南", "河内", "ベトナム", "ハノイ"),
)

UNITED_STATES: Final = COUNTRIES[0]

WORDINGS: Final[Mapping[Language, Wording]] = {
    "english": Wording(
        phrasings=(
            "Where is the capital of {}",
            "What is the capital of {}",
            "What's the capital of {}",
            "Which city is the capital of {}",
        ),
        closing_marks=("?",),
        cues=("Answer:",),
        instructions={
            "english": " Answer in English.",  # language: quoted
            "chinese": " Answer in Chinese.",  # language: quoted
            "japanese": " Answer in Japanese.",  # language: quoted
        },
    ),
    "chinese": Wording(
        phrasings=("{}的首都在哪里", "{}的首都是哪里", "{}的首都是什么", "{}的首都是哪个城市"),
        closing_marks=("?", "？"),
        cues=("答案:", "答案："),
        instructions={
            "english": "请用英语回答。",
            "chinese": "请用中文回答。",
            "japanese": "请用日语回答。",
        },
    ),
    "japanese": Wording(
        phrasings=("{}の首都はどこですか", "{}の首都は何ですか", "{}の首都はどこ", "{}の首都は"),
        closing_marks=("?", "？"),
        cues=("答え:", "答え："),
        instructions={
            "english": "英語で答えてください。",
            "chinese": "中国語で答えてください。",
            "japanese": "日本語で答えてください。",
        },
    ),
}

_BREAKS: Final = (r" \n", "\n", " \n", " ")  # before the cue; the founding one first


def name(country: Country, language: Language) -> str:
    names: dict[Language, str] = {
        "english": country.english,
        "chinese": country.chinese,
        "japanese": country.japanese,
    }
    return names[language]


def capital_of(country: Country, language: Language) -> str:
    """Return the capital as the model writes it in that language."""
    capitals: dict[Language, str] = {
        "english": country.english_capital,
        "chinese": country.chinese_capital,
        "japanese": country.japanese_capital,
    }
    return capitals[language]


def founding_prompts(country: Country) -> dict[Language, str]:
    """Return the founding prompt in each language: query, backslash-n, cue."""
    return {
        language: phrased_queries(country, language)[0] + tails(language)[0]
        for language in LANGUAGES
    }


def chat_messages(country: Country) -> dict[Language, tuple[str, ...]]:
    """Return what a user may write in a chat message, without cue, in each language."""
    return {language: phrased_queries(country, language) for language in LANGUAGES}


def phrased_queries(country: Country, language: Language) -> tuple[str, ...]:
    """Return every phrasing with every closing mark; the founding one comes first."""
    wording = WORDINGS[language]
    return tuple(
        phrasing.format(name(country, language)) + mark
        for phrasing, mark in product(wording.phrasings, wording.closing_marks)
    )


def tails(language: Language) -> tuple[str, ...]:
    """Return what may follow a query in a plain prompt; the founding tail comes first."""
    cued = (line_break + cue for line_break, cue in product(_BREAKS, WORDINGS[language].cues))
    return (*cued, "")


def chat_prompt(message: str) -> str:
    """Return what the chat template makes of a user's last message, without the BOS token."""
    return f"{USER_TOKEN}{message}{ASSISTANT_TOKEN}"


def prompts(country: Country, language: Language, target: Language | None = None) -> Iterator[str]:
    """Yield every prompt in that language, plain and as chat.

    With a target, the prompt also names the output language.
    """
    instruction = WORDINGS[language].instructions[target] if target else ""
    for query in phrased_queries(country, language):
        yield chat_prompt(query + instruction)
        for tail in tails(language):
            yield query + instruction + tail
