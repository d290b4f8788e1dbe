"""The style sheet of the transcripts page; it follows the reader's light or dark mode."""

STYLE = """\
:root {
  color-scheme: light dark;
  --page: light-dark(#f6f7f9, #14171c);
  --sheet: light-dark(#ffffff, #1c2128);
  --ink: light-dark(#1d2430, #e3e7ee);
  --dim: light-dark(#626d7d, #97a1b0);
  --line: light-dark(#dde1e7, #333b47);
  --agent: light-dark(#e4eefc, #1d3350);
  --other: light-dark(#eff1f4, #272e38);
  --good: light-dark(#167a3e, #5fd08a);
  --good-soft: light-dark(#e6f5ec, #17301f);
  --bad: light-dark(#b3261e, #ff8b82);
  --bad-soft: light-dark(#fcebea, #3a1d1c);
  --warn: light-dark(#8a5300, #f2b957);
  --warn-soft: light-dark(#fdf3df, #3a2d14);
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; max-width: 60rem; padding: 1.5rem 1rem 4rem;
  background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif;
}
h1 { margin: 0; font-size: 1.35rem; overflow-wrap: anywhere; }
.note { margin: .2rem 0 1rem; color: var(--dim); }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(11rem, 1fr)); gap: .6rem; }
.card, .episode {
  background: var(--sheet); border: 1px solid var(--line); border-radius: .6rem;
}
.card { display: flex; flex-direction: column; padding: .6rem .8rem; }
.card b { font-variant-numeric: tabular-nums; }
.card span, .facts, .who, .end { color: var(--dim); font-size: .82rem; }
.warning {
  margin: .7rem 0 0; padding: .5rem .8rem; border-radius: .6rem;
  background: var(--warn-soft); color: var(--warn);
}
.warning::before { content: "Warning: "; font-weight: 600; }
.episode { margin-top: .8rem; padding: 0 1rem; }
.episode > summary { padding: .7rem 0; cursor: pointer; overflow-wrap: anywhere; }
.episode[open] { padding-bottom: .6rem; }
.text { white-space: pre-wrap; overflow-wrap: anywhere; unicode-bidi: isolate; }
.bubble { width: fit-content; max-width: 85%; margin: .6rem 0; padding: .45rem .8rem; }
.bubble, .critic { border-radius: .8rem; }
.agent { margin-left: auto; background: var(--agent); border-bottom-right-radius: .2rem; }
.other { background: var(--other); border-bottom-left-radius: .2rem; }
.agent .text { font-family: ui-monospace, monospace; font-size: .92em; }
.critic, .bubble.aside, details.aside {
  width: fit-content; max-width: 78%; margin: .4rem 0 .4rem auto; font-size: .92em;
}
.critic { padding: .45rem .8rem; border-left: 4px solid var(--line); background: var(--other); }
.critic.good { border-color: var(--good); background: var(--good-soft); }
.critic.bad { border-color: var(--bad); background: var(--bad-soft); }
.predicted { margin-bottom: .35rem; font-style: italic; }
.bubble.aside { border: 1px dashed var(--dim); }
.system, details.aside { color: var(--dim); }
.system { padding: .2rem .8rem; border-left: 2px solid var(--line); }
.system summary, .aside summary { cursor: pointer; font-size: .82rem; }
.chip {
  display: inline-block; margin-right: .25em; padding: 0 .5em;
  border-radius: 1em; font-size: .78rem; border: 1px solid currentColor; color: var(--dim);
}
.chip.good { color: var(--good); }
.chip.bad { color: var(--bad); }
.end { margin: .8rem 0 .2rem; text-align: center; }
"""
