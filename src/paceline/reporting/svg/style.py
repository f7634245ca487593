"""The CSS of the pages, with light and dark colours."""

_LIGHT = (
    "#2563a8", "#b4541a", "#2c7a4b", "#7a4fa3", "#a33a56", "#5f6b76",
    "#1d8a99", "#c49a1a", "#86b06a", "#c28bd0", "#8a5a3c", "#aab4bd",
)  # fmt: skip
_DARK = (
    "#7fb2ea", "#e59a63", "#7cc79a", "#bd9be0", "#e58aa2", "#a5b0ba",
    "#4fc3d2", "#e6c75a", "#4f8a4a", "#7d4f96", "#b98a66", "#5b6670",
)  # fmt: skip

FILLS = len(_LIGHT)  # the number of fill colours


def _color_rules(colours: tuple[str, ...]) -> str:
    return "".join(
        f".line{n}{{stroke:{c}}}.fill{n}{{fill:{c}}}.ink{n}{{fill:{c}}}.box{n}{{background:{c}}}"
        for n, c in enumerate(colours)
    )


STYLE = (
    """
:root{--bg:#fbfbfa;--ink:#1d2126;--soft:#626b75;--rule:#dfe2e5;--card:#fff;color-scheme:light dark}
@media(prefers-color-scheme:dark){:root{--bg:#15181b;--ink:#e5e8eb;--soft:#9aa4ae;--rule:#2b3138;--card:#1c2024}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:1360px;margin:0 auto;padding:24px 16px 64px}
h1{font-size:22px;margin:0 0 12px;font-weight:600;overflow-wrap:anywhere}
h1 small{color:var(--soft);font-weight:400;font-size:15px}
h2{font-size:16px;margin:32px 0 10px;font-weight:600}
h3{font-size:14px;margin:8px 0 4px;color:var(--soft);font-weight:500}
dl{display:flex;flex-wrap:wrap;gap:10px 28px;margin:0;padding:14px 0;border-block:1px solid var(--rule)}
dt{color:var(--soft);font-size:12px}dd{margin:0;font-size:19px;font-variant-numeric:tabular-nums}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(300px,1fr));gap:12px}
figure{margin:0;background:var(--card);border:1px solid var(--rule);border-radius:6px;padding:6px}
svg{display:block;width:100%;height:auto}
.bar{height:22px;border-radius:4px;overflow:hidden}
polyline{fill:none;stroke-width:1.6;stroke-linejoin:round;vector-effect:non-scaling-stroke}
.grid{stroke:var(--rule)}.mark{stroke:var(--soft);stroke-dasharray:3 3}.lost{stroke:#d33;stroke-width:2}
.title{font:600 12px system-ui,sans-serif;fill:var(--ink)}.tick{font:10px system-ui,sans-serif;fill:var(--soft)}
.over-lines{paint-order:stroke;stroke:var(--card);stroke-width:3px}
.legend{display:flex;flex-wrap:wrap;gap:4px 18px;margin:8px 0 0;color:var(--soft);font-size:13px}
.legend i,th i{display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:6px}
table{border-collapse:collapse;font-size:14px;font-variant-numeric:tabular-nums}
td,th{text-align:left;padding:4px 18px 4px 0;border-bottom:1px solid var(--rule);vertical-align:top}
th{color:var(--soft);font-weight:500;font-size:12px}td{overflow-wrap:anywhere}
.plans{overflow-x:auto}.plans td{white-space:nowrap}.plans td:last-child{white-space:normal;min-width:26em}.plans .soft{margin:0}
.wide{overflow-x:auto}.wide td{overflow-wrap:break-word}.wide th,.wide td:first-child{white-space:nowrap}.wide td:nth-child(n+5){min-width:16em}.wider{grid-template-columns:repeat(auto-fit,minmax(300px,1fr))}
.table{overflow-x:auto}.table td,.table th{white-space:nowrap}.table td:first-child{white-space:normal;min-width:14em}.table svg{min-width:620px}
.band{opacity:.22}.over{stroke-dasharray:6 3}.soft{color:var(--soft);font-size:13px;margin:4px 0 10px}
.notice,.failure{border-left:3px solid #d33;background:var(--card);padding:8px 12px;margin:12px 0;border-radius:0 6px 6px 0}
.failure p{margin:2px 0 6px;overflow-wrap:anywhere}.failure summary{font-weight:400;color:var(--soft);font-size:13px}
figcaption.legend{margin:2px 6px 4px;font-size:12px}
.badge{font-size:12px;font-weight:600;padding:2px 8px;border-radius:10px;border:1px solid currentColor;white-space:nowrap}
.bitwise{color:#2c7a4b}.rounding{color:#2563a8}.different,.undecided,.bad{color:#b3362f}
@media(prefers-color-scheme:dark){.bitwise{color:#7cc79a}.rounding{color:#7fb2ea}.different,.undecided,.bad{color:#ee8a83}}
pre{background:var(--card);border:1px solid var(--rule);border-radius:6px;padding:10px;overflow-x:auto;font-size:13px}
summary{cursor:pointer;font-weight:600}details table{margin-top:8px}
ul{margin:0;padding-left:18px}li{margin:2px 0}
@media print{details{display:block}figure{break-inside:avoid}}
"""
    + _color_rules(_LIGHT)
    + "@media(prefers-color-scheme:dark){"
    + _color_rules(_DARK)
    + "}"
)
