/** Where the page and its tables are scrolled to, kept in the entries of the history: back and forward, and a reload,
 * lead to the place that was left. And the end of a page whose parts are made late. */

type Places = Readonly<Record<string, number>>;

const PAGE = "page";
const KEEP_AFTER_MS = 200;
/** How long a page may take to become as long as it was. */
const PATIENCE_MS = 3_000;

const waiting = new Map<string, number>();
let timer: number | undefined;

function placesOf(state: unknown): Places {
  return (state as { places?: Places } | null)?.places ?? {};
}

/** CSS pixels; 0 where nothing is kept under this name. */
export function keptPlace(name: string): number {
  return placesOf(window.history.state)[name] ?? 0;
}

export function keepPlace(name: string, top: number): void {
  waiting.set(name, top);
  timer ??= window.setTimeout(flushPlaces, KEEP_AFTER_MS);
}

/** To be called before the history has another entry. */
export function flushPlaces(): void {
  if (waiting.size > 0) {
    const places = { ...placesOf(window.history.state), ...Object.fromEntries(waiting) };
    window.history.replaceState({ places }, "");
  }
  dropPlaces();
}

function dropPlaces(): void {
  waiting.clear();
  window.clearTimeout(timer);
  timer = undefined;
}

/** Keeps the place of the page itself from now on. */
export function keepPagePlace(): void {
  window.history.scrollRestoration = "manual";
  window.addEventListener("keydown", followEnd);
  window.addEventListener("scroll", () => keepPlace(PAGE, window.scrollY), { passive: true });
  window.addEventListener("popstate", () => {
    dropPlaces(); // of the entry that was left
    restorePagePlace();
  });
  restorePagePlace();
}

/** Scrolls as soon as the page is long enough, unless the reader was sooner. */
function restorePagePlace(): void {
  const top = keptPlace(PAGE);
  whileUntouched(() => {
    if (document.documentElement.scrollHeight < top + window.innerHeight) return false;
    window.scrollTo(0, top);
    return true;
  });
}

/** The End key leads to the end that the page has once the parts near it are made: they get their heights only
 * then, and push the last one away. */
function followEnd(event: KeyboardEvent): void {
  if (event.key !== "End" || event.defaultPrevented || scrollsItself(event.target)) return;
  if (event.metaKey || event.altKey || event.shiftKey) return;
  event.preventDefault(); // the browser's own way there stops short where the page changes meanwhile
  whileUntouched(() => {
    window.scrollTo(0, document.documentElement.scrollHeight);
    return false;
  });
}

/** Whether the key is for what it was pressed in: a field, or a table that scrolls by itself. */
function scrollsItself(target: EventTarget | null): boolean {
  for (let element = target instanceof Element ? target : null; element; element = element.parentElement) {
    if (element === document.body) return false;
    if (element.matches("input, textarea, select")) return true;
    const scrolls = /auto|scroll/.test(getComputedStyle(element).overflowY);
    if (scrolls && element.scrollHeight > element.clientHeight) return true;
  }
  return false;
}

/** Tries now and whenever the page has another height, until `act` says that it is done, the reader does something,
 * or patience ends. */
function whileUntouched(act: () => boolean): void {
  const end = new AbortController();
  const watch = new ResizeObserver(() => {
    if (act()) end.abort();
  });
  end.signal.addEventListener("abort", () => watch.disconnect());
  for (const event of ["wheel", "keydown", "pointerdown"]) {
    window.addEventListener(event, () => end.abort(), { signal: end.signal, passive: true });
  }
  window.setTimeout(() => end.abort(), PATIENCE_MS);
  watch.observe(document.body);
}
