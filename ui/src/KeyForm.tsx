/** Asks for the control key. It is shown when the server refuses, with the server's reason. */

import { useRef } from "preact/hooks";
import { SafeText } from "./components/SafeText";
import { currentKey, enterKey } from "./session";

export function KeyForm({ refused }: { refused: string }) {
  const field = useRef<HTMLInputElement>(null);
  const submit = (event: SubmitEvent): void => {
    event.preventDefault();
    const key = field.current?.value.trim();
    if (key) enterKey(key);
  };
  const wrong = currentKey() !== null;
  return (
    <main class="key-form">
      <h1>Turnstile</h1>
      <form onSubmit={submit}>
        <label for="key">Control key</label>
        <input
          ref={field}
          id="key"
          type="password"
          autocomplete="off"
          spellcheck={false}
          required
          autofocus
          aria-describedby="key-why"
          aria-invalid={wrong}
        />
        <button type="submit">Open</button>
      </form>
      <div id="key-why" role="alert" class={wrong ? "error" : "hint"}>
        {wrong && <strong>This key was refused.</strong>}
        <SafeText text={refused} />
      </div>
      <p class="calm">
        The key is kept until the last tab of the viewer is closed. <code>turnstile ui</code> opens this page with the key.
      </p>
    </main>
  );
}
