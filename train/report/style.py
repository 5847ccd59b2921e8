"""The page that the report is put into: its frame and its style, light and dark."""

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root { color-scheme: light dark;
  --page: #f6f6f4; --card: #fff; --ink: #16161a; --muted: #6a6a70; --grid: #e4e4e0;
  --series-1: #2a78d6; --series-2: #d9622b; --series-3: #1b8f6a; }
@media (prefers-color-scheme: dark) { :root {
  --page: #131316; --card: #1c1c20; --ink: #ececf0; --muted: #9b9ba3; --grid: #34343a;
  --series-1: #5b9ef0; --series-2: #f08a55; --series-3: #45bd95; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 32px 24px 64px; display: grid; gap: 16px; }
h1 { font-size: 26px; line-height: 1.2; letter-spacing: -0.01em; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 14px; font-weight: 600; margin: 0 0 6px; }
.facts { color: var(--muted); margin: 6px 0 0; } .facts b { color: var(--ink); font-weight: 500; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(138px, 1fr)); gap: 12px; margin: 0; }
.tile, .card { background: var(--card); border: 1px solid var(--grid); border-radius: 10px; }
.tile { padding: 12px 14px; }
.tile dt, .tile small { color: var(--muted); font-size: 12px; display: block; }
.tile dd { margin: 2px 0 0; font-size: 20px; font-weight: 600; letter-spacing: -0.01em;
  white-space: nowrap; }
.grid { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 16px; }
.card { margin: 0; padding: 14px 16px; min-width: 0; } .wide { grid-column: 1 / -1; }
.card svg { display: block; width: 100%; height: auto; }
.banner { border-color: var(--series-2); border-left: 6px solid var(--series-2); }
.note { color: var(--muted); font-size: 13px; margin: -4px 0 8px; }
details + details { margin-top: 4px; } summary { cursor: pointer; color: var(--muted); font-size: 13px; }
pre { margin: 8px 0; padding: 12px; background: var(--page); border-radius: 8px; max-height: 420px;
  overflow: auto; white-space: pre-wrap; overflow-wrap: anywhere;
  font: 12.5px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
table { border-collapse: collapse; width: 100%; font-size: 13px; }
th { text-align: left; color: var(--muted); font-weight: 500; }
th, td { padding: 5px 12px 5px 0; border-top: 1px solid var(--grid); vertical-align: top; }
.slim { display: none; }
@media (max-width: 720px) { .grid { grid-template-columns: minmax(0, 1fr); } .broad { display: none; }
  .slim { display: block; } main { padding: 20px 12px 40px; } .card { padding: 12px; }
  .tiles { gap: 8px; } .tile { padding: 10px 12px; } }
</style>
</head>
<body><main>
{body}
</main></body>
</html>
"""
