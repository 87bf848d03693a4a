"""The style sheet of a report: light, dark and on paper. Text has a contrast of at least 4.5 everywhere."""

STYLE = """
:root { color-scheme: light dark; --page: #fff; --ink: #1b1f24; --faint: #57606a; --line: #d0d7de; --box: #f6f8fa;
  --mark: #0b5cad; --band: #0b5cad26; --l0: #dff3e4; --l1: #eef5d0; --l2: #fdf0c8; --l3: #fde0cc; --l4: #fbd3d6; }
@media (prefers-color-scheme: dark) {
  :root { --page: #12161b; --ink: #e6edf3; --faint: #a2acb7; --line: #3a424c; --box: #1b2129; --mark: #79b8ff;
    --band: #79b8ff30; --l0: #173a25; --l1: #333d14; --l2: #453810; --l3: #4d2d17; --l4: #54222a; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 1.5rem; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1, h2, h3, h4 { line-height: 1.25; overflow-wrap: anywhere; }
h2 { margin-top: 2.5rem; border-bottom: 1px solid var(--line); }
h4 { margin: .8rem 0 .3rem; font-size: .9rem; color: var(--faint); font-weight: 600; }
a { color: var(--mark); }
.note { color: var(--faint); font-size: .9rem; }
.why { font-weight: 600; overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; }
dt { color: var(--faint); }
dd { margin: 0; overflow-wrap: anywhere; white-space: pre-wrap; unicode-bidi: isolate; }
.tiles { display: flex; flex-wrap: wrap; gap: .8rem; padding: 0; margin: 1rem 0; list-style: none; }
.tiles li { border: 1px solid var(--line); background: var(--box); border-radius: 6px; padding: .5rem .9rem; }
.tiles strong { display: block; font-size: 1.35rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(26rem, 1fr)); gap: 1rem; }
figure { margin: 0; border: 1px solid var(--line); border-radius: 6px; padding: .6rem; break-inside: avoid; }
figcaption { font-weight: 600; }
svg { width: 100%; height: auto; display: block; }
.grid { stroke: var(--line); } .mark { fill: var(--faint); font-size: 12px; }
.curve { fill: none; stroke: var(--mark); stroke-width: 2; } .dot, .bar { fill: var(--mark); }
.band { fill: var(--band); }
.table { margin: 1.2rem 0; }
table { border-collapse: collapse; font-size: .85rem; width: 100%; }
caption { text-align: left; font-weight: 600; font-size: 1rem; padding: .3rem 0; }
th, td { border-bottom: 1px solid var(--line); padding: .25rem .5rem; text-align: left; vertical-align: top;
  overflow-wrap: anywhere; unicode-bidi: isolate; }
th.n, td.n { text-align: right; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
thead th { background: var(--box); }
tbody th { font-weight: 400; }
.episode { border-top: 3px solid var(--line); margin-top: 2rem; }
summary { cursor: pointer; font-weight: 600; margin: .6rem 0; }
pre { margin: .2rem 0; padding: .5rem .7rem; background: var(--box); border-radius: 6px; white-space: pre-wrap;
  overflow-wrap: anywhere; unicode-bidi: isolate; font: .85rem/1.45 ui-monospace, monospace; }
.who { margin: .4rem 0 0; font-size: .8rem; color: var(--faint); }
.sampled pre { border-left: 4px solid var(--mark); }
.l0 { background: var(--l0); } .l1 { background: var(--l1); } .l2 { background: var(--l2); }
.l3 { background: var(--l3); } .l4 { background: var(--l4); }
.tokens .t { text-decoration: underline 2px; text-underline-offset: 3px; }
.tokens .u { text-decoration: underline dotted 2px; text-underline-offset: 3px; }
.tokens .s { font-weight: 700; font-style: italic; }
:focus-visible { outline: 3px solid var(--mark); outline-offset: 2px; }
@media print { body { max-width: none; padding: 0; font-size: 11px; }
  .l0, .l1, .l2, .l3, .l4, pre, .band { print-color-adjust: exact; }
  details::details-content { content-visibility: visible; display: block; }
  tr, figure, .turn h4 { break-inside: avoid; } h2, h3, h4 { break-after: avoid; } }
"""
