/** Every shared component with made data: `tests/ui/test_components.py` bundles it and looks at it in the browser.
 * It is not part of the viewer. */

import { render } from "preact";
import { useMemo, useState } from "preact/hooks";
import "../src/style.css";
import { StatusBadge } from "../src/components/Badge";
import { Chart } from "../src/components/Chart";
import { Diff, TextDiff } from "../src/components/Diff";
import { JsonView } from "../src/components/JsonView";
import { SafeText } from "../src/components/SafeText";
import { StackedBar } from "../src/components/StackedBar";
import { type LaneSpan, Swimlane } from "../src/components/Swimlane";
import { type Sort, VirtualTable } from "../src/components/VirtualTable";
import { count, seconds } from "../src/text/format";

const ROWS = 10_000;
const SPANS = 5_000;
const DIFF = `diff --git a/x.py b/x.py
--- a/x.py
+++ b/x.py
@@ -1,3 +1,3 @@
 def f():
---- not a file name
+    return "<b>\u202e\x1b[31m"
 
`;

interface Row {
  id: number;
}

function Table() {
  const [sort, setSort] = useState<Sort>({ by: "id", order: "asc" });
  const [opened, setOpened] = useState("");
  const load = useMemo(
    () => (offset: number, limit: number) => {
      const ids = Array.from({ length: Math.min(limit, ROWS - offset) }, (_, index) => offset + index);
      return Promise.resolve({ rows: ids.map((id) => ({ id: sort.order === "asc" ? id : ROWS - 1 - id })), total: ROWS });
    },
    [sort],
  );
  return (
    <section aria-label="Table">
      <VirtualTable<Row>
        label="Numbers"
        columns={[
          { id: "id", title: "Number", width: 10, numeric: true, sortable: true, cell: (row) => count(row.id) },
          { id: "square", title: "Square", width: 10, grow: 1, cell: (row) => row.id * row.id },
        ]}
        rowKey={(row) => String(row.id)}
        load={load}
        sort={sort}
        onSort={setSort}
        onOpen={(row) => setOpened(`opened ${row.id}`)}
        height="300px"
      />
      <p id="opened">{opened}</p>
    </section>
  );
}

function Curves() {
  const x = useMemo(() => ({ label: "Step", values: Array.from({ length: 300 }, (_, index) => index) }), []);
  const series = useMemo(
    () => [
      { label: "Reward", values: x.values.map((value) => Math.sin(value / 30)) },
      { label: "Pass rate", values: x.values.map((value) => (value % 7 ? Math.cos(value / 50) : null)) },
    ],
    [x],
  );
  return <Chart title="Rewards" x={x} series={series} format={formatted} />;
}

const formatted = (value: number): string => value.toFixed(2);

function Lanes() {
  const [opened, setOpened] = useState("");
  const spans = useMemo<LaneSpan[]>(
    () =>
      Array.from({ length: SPANS }, (_, index) => ({
        id: `s${index}`,
        lane: index % 2 ? "model" : "tools",
        kind: index % 2 ? "model" : "tool",
        label: `call ${index}`,
        start: index * 0.5,
        end: index === SPANS - 1 ? null : index * 0.5 + 0.4,
        ok: index !== 3,
        detail: "\u202edetail",
      })),
    [],
  );
  return (
    <section aria-label="Lanes">
      <Swimlane
        label="Time"
        lanes={["model", "tools"]}
        kinds={["model", "tool"]}
        spans={spans}
        end={SPANS / 2}
        onOpen={(span) => setOpened(`span ${span.id}`)}
      />
      <p id="span">{opened}</p>
    </section>
  );
}

function Gallery() {
  const large = useMemo(() => "x\u202ey\x1b[0m".repeat(1_700_000), []);
  return (
    <main>
      <h1>Components</h1>
      <p><StatusBadge status="completed" /> <StatusBadge status="failed" /> <StatusBadge status="timed_out" /></p>
      <Table />
      <Curves />
      <StackedBar
        label="Time"
        parts={[{ name: "queue", value: 2 }, { name: "model", value: 30 }, { name: "tools", value: 0 }]}
        format={seconds}
      />
      <Lanes />
      <section aria-label="Large text"><SafeText text={large} /></section>
      <Diff diff={DIFF} label="Unified" />
      <TextDiff before={"a\nb\nc"} after={"a\nx\nc\nd"} label="Texts" />
      <JsonView value={{ a: [1, 2, { b: "<i>" }], long: "line\n".repeat(40), many: Array.from({ length: 250 }, (_, index) => index) }} depth={2} />
    </main>
  );
}

const root = document.getElementById("app");
if (root) render(<Gallery />, root);
