/** Rows by offset from a route that pages by cursor: pages are read in order, as far as they are wanted. */

export interface CursorPage<Row> {
  readonly rows: readonly Row[];
  readonly cursor: string | null;
}

/** A ``load`` for VirtualTable. ``total`` grows while there are further pages. */
export function cursorRows<Row>(
  fetchPage: (cursor: string | null, signal: AbortSignal) => Promise<CursorPage<Row>>,
): (offset: number, limit: number, signal: AbortSignal) => Promise<{ rows: readonly Row[]; total: number }> {
  const rows: Row[] = [];
  let next: string | null = null;
  let ended = false;
  let reading: Promise<void> = Promise.resolve();
  return async (offset, limit, signal) => {
    const read = async (): Promise<void> => {
      while (!ended && rows.length < offset + limit) {
        const page = await fetchPage(next, signal);
        rows.push(...page.rows);
        next = page.cursor;
        ended = next === null;
      }
    };
    reading = reading.then(read, read); // one page at a time, also after one that failed
    await reading;
    return { rows: rows.slice(offset, offset + limit), total: rows.length + (ended ? 0 : limit) };
  };
}
