/** The table of pages: one line each. The first whose path fits is shown. */

import type { FunctionComponent } from "preact";
import { ComparePage } from "./pages/ComparePage";
import { EpisodePage } from "./pages/EpisodePage";
import { EpisodesPage } from "./pages/EpisodesPage";
import { GroupPage } from "./pages/GroupPage";
import { GroupsPage } from "./pages/GroupsPage";
import { ReplayPage } from "./pages/ReplayPage";
import { RunPage } from "./pages/RunPage";
import { RunsPage } from "./pages/RunsPage";
import { TokensPage } from "./pages/TokensPage";
import { type Params, pathOf } from "./router";

export interface Crumb {
  readonly title: string;
  /** A path below `/ui`; none for the page itself. */
  readonly to?: string;
}

export interface Page {
  /** Below `/ui`; ``:name`` stands for one part, which the page gets as ``params.name``. */
  readonly path: string;
  readonly component: FunctionComponent<{ params: Params }>;
  /** From the outermost page to this one. */
  readonly crumbs: (params: Params) => readonly Crumb[];
  /** Its name in the navigation; none: it is not there. */
  readonly nav?: string;
}

export const PAGES: readonly Page[] = [
  { path: "/runs", nav: "Runs", component: RunsPage, crumbs: () => [{ title: "Runs" }] },
  { path: "/runs/:run", component: RunPage, crumbs: ({ run = "" }) => [{ title: "Runs", to: "/runs" }, { title: run }] },
  { path: "/runs/-/all", component: RunPage, crumbs: () => [{ title: "Runs", to: "/runs" }, { title: "All episodes" }] },
  { path: "/episodes", nav: "Episodes", component: EpisodesPage, crumbs: () => [{ title: "Episodes" }] },
  {
    path: "/episodes/:id",
    component: EpisodePage,
    crumbs: ({ id = "" }) => [{ title: "Episodes", to: "/episodes" }, { title: id }],
  },
  {
    path: "/episodes/:id/tokens/:turn",
    component: TokensPage,
    crumbs: ({ id = "" }) => [
      { title: "Episodes", to: "/episodes" },
      { title: id, to: pathOf("episodes", id) },
      { title: "Tokens" },
    ],
  },
  {
    path: "/episodes/:id/replay",
    component: ReplayPage,
    crumbs: ({ id = "" }) => [
      { title: "Episodes", to: "/episodes" },
      { title: id, to: pathOf("episodes", id) },
      { title: "Replay" },
    ],
  },
  {
    path: "/compare/:first/:second",
    component: ComparePage,
    crumbs: () => [{ title: "Episodes", to: "/episodes" }, { title: "Compare" }],
  },
  { path: "/groups", nav: "Groups", component: GroupsPage, crumbs: () => [{ title: "Groups" }] },
  { path: "/groups/:id", component: GroupPage, crumbs: ({ id = "" }) => [{ title: "Groups", to: "/groups" }, { title: id }] },
];

/** Where `/ui` itself leads. */
export const START = "/runs";
