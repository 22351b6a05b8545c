(() => {
  "use strict";
  const root = document.documentElement;
  root.classList.add("js");
  const all = (selector, from = document) => Array.from(from.querySelectorAll(selector));
  const byId = (id) => document.getElementById(id);

  /* Theme: the style sheet holds the colours, figures read them, because plotly ignores var(--x). */
  const prefersDark = matchMedia("(prefers-color-scheme: dark)");
  const choices = ["automatic", "light", "dark"];
  const themeButton = byId("theme");
  let choice = "automatic";

  const colours = () => {
    const style = getComputedStyle(root);
    const read = (name) => style.getPropertyValue(name).trim();
    return {
      ink: read("--ink"), muted: read("--muted"), line: read("--line"), surface: read("--surface"),
      empty: read("--empty"), frame: read("--frame"),
      diverging: [[0, read("--down-2")], [0.25, read("--down-1")], [0.5, read("--zero")],
                  [0.75, read("--up-1")], [1, read("--up-2")]],
      up: read("--bar-up"), down: read("--bar-down"), total: read("--bar-total"),
      series: [1, 2, 3, 4, 5, 6].map((n) => read("--series-" + n)),
      font: style.fontFamily,
    };
  };

  const painted = (spec) => {
    const c = colours();
    const data = spec.data.map((trace) => {
      const meta = trace.meta || {};
      if (meta.role === "diverging") {
        return { ...trace, colorscale: c.diverging, textfont: { size: 12 },
                 colorbar: { ...trace.colorbar, tickfont: { color: c.muted, size: 11 } } };
      }
      if (meta.role === "empty") {
        return { ...trace, colorscale: [[0, c.empty], [1, c.empty]] };
      }
      if (meta.role === "faint") {
        return { ...trace, marker: { ...trace.marker, color: c.muted,
                                     line: { color: c.muted, width: 1.1 } } };
      }
      if (meta.role === "bars") {
        return { ...trace, marker: { color: meta.kinds.map((kind) => c[kind]) },
                 error_x: { ...trace.error_x, color: c.ink } };
      }
      if (meta.role === "links") {
        return { ...trace, line: { color: c.muted, width: 1 } };
      }
      const colour = c.series[meta.series % c.series.length];
      return { ...trace, line: { ...trace.line, color: colour },
               marker: { ...trace.marker, color: colour } };
    });
    const axis = (given, extra) => ({ ...given, gridcolor: c.line, linecolor: c.line,
      zerolinecolor: c.muted, ticks: "", ...extra,
      title: { standoff: 14, ...given.title, font: { size: 12, color: c.muted } } });
    const layout = { ...spec.layout, autosize: true, paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: spec.data[0].type === "heatmap" ? c.line : "rgba(0,0,0,0)",
      font: { family: c.font, size: 12, color: c.ink },
      hoverlabel: { bgcolor: c.surface, bordercolor: c.muted, align: "left",
                    font: { color: c.ink, family: c.font, size: 12.5 } },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: c.muted, activecolor: c.ink },
      xaxis: axis(spec.layout.xaxis), yaxis: axis(spec.layout.yaxis),
      shapes: (spec.layout.shapes || []).map((shape) => (
        { ...shape, line: { color: c.frame, width: 2.4 }, fillcolor: "rgba(0,0,0,0)" })) };
    return { data, layout };
  };

  const repaint = () => {
    for (const plot of all(".plot[data-drawn]")) {
      const { data, layout } = painted(plot.headstreamSpec);
      Plotly.react(plot, data, layout, config(plot)).then(() => name(plot));
    }
  };

  const setTheme = (next) => {
    choice = next;
    if (choice === "automatic") delete root.dataset.theme; else root.dataset.theme = choice;
    themeButton.textContent = "Theme: " + choice;
    repaint();
  };
  themeButton.addEventListener("click", () => {
    setTheme(choices[(choices.indexOf(choice) + 1) % choices.length]);
  });
  prefersDark.addEventListener("change", repaint);

  /* Five signs for four bytes; a last group of fewer is filled with the highest digit, and cut. */
  const digits =
    "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%:()*+-;,=.?@^_`{|}~";
  const bytesOf = (text) => {
    const value = new Uint8Array(128);
    for (let i = 0; i < 85; i += 1) value[digits.charCodeAt(i)] = i;
    const view = new DataView(new ArrayBuffer(4 * Math.ceil(text.length / 5)));
    for (let at = 0, to = 0; at < text.length; at += 5, to += 4) {
      let sum = 0;
      for (let i = at; i < at + 5; i += 1) {
        sum = 85 * sum + (i < text.length ? value[text.charCodeAt(i)] : 84);
      }
      view.setUint32(to, sum);
    }
    return new Uint8Array(view.buffer, 0, Math.floor(4 * text.length / 5));
  };

  const unpacked = (id) => {
    const stream = new Blob([bytesOf(byId(id).textContent)]).stream();
    return new Response(stream.pipeThrough(new DecompressionStream("gzip"))).text();
  };

  /* The figures' data and the library: unpacked once, when the first figure comes near; the library
     runs as an inline script whose hash the page's policy allows. */
  let specs = null;
  let library = null;
  const load = () => {
    library ??= (async () => {
      specs = JSON.parse(await unpacked("figures-packed"));
      const script = document.createElement("script");
      script.textContent = await unpacked("plotly-packed");
      document.head.append(script);
      if (!window.Plotly) throw new Error("the drawing library did not start");
    })();
    return library;
  };

  const config = (plot) => ({
    showSendToCloud: false, plotlyServerURL: "", displaylogo: false, responsive: true,
    typesetMath: false, displayModeBar: "hover",
    modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d", "zoomIn2d", "zoomOut2d"],
    toImageButtonOptions: { format: "png", filename: plot.id, scale: 2 },
  });

  /* plotly gives its pictures neither role nor name. */
  const name = (plot) => {
    all(".main-svg", plot).forEach((svg, index) => {
      if (index) { svg.setAttribute("aria-hidden", "true"); return; }
      svg.setAttribute("role", "img");
      svg.setAttribute("aria-label", plot.getAttribute("aria-label"));
    });
  };

  const draw = (plot) => {
    if (plot.dataset.drawn) return;
    plot.dataset.drawn = "drawing";
    plot.headstreamSpec = specs[plot.id];
    const { data, layout } = painted(plot.headstreamSpec);
    Plotly.newPlot(plot, data, layout, config(plot)).then(() => {
      name(plot);
      plot.dataset.drawn = "yes";
    });
  };

  const plots = all(".plot");
  const failed = (plot, error) => {
    plot.textContent = "The figure could not be drawn (" + error.message
      + "). The table below it has the same numbers.";
  };
  const near = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      near.unobserve(entry.target);
      load().then(() => draw(entry.target)).catch((error) => failed(entry.target, error));
    }
  }, { rootMargin: "600px" });
  plots.forEach((plot) => near.observe(plot));
  /* So that printing, which cannot wait, finds the library there. */
  const idle = window.requestIdleCallback || ((task) => setTimeout(task, 200));
  if (plots.length) addEventListener("load", () => idle(() => load().catch(() => {})));

  /* Print: everything drawn, everything open, light. */
  let opened = [];
  addEventListener("beforeprint", () => {
    root.dataset.printing = "";
    opened = all("details:not([open])");
    opened.forEach((fold) => { fold.open = true; });
    if (window.Plotly) { plots.forEach(draw); repaint(); }
  });
  addEventListener("afterprint", () => {
    delete root.dataset.printing;
    opened.forEach((fold) => { fold.open = false; });
    if (window.Plotly) repaint();
  });

  /* Save: the very bytes whose hash the page shows. */
  for (const button of all("button[data-save]")) {
    button.addEventListener("click", () => {
      const blob = new Blob([byId("headstream-result").textContent], { type: "application/json" });
      const link = document.createElement("a");
      link.href = URL.createObjectURL(blob);
      link.download = button.dataset.save;
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 10000);
    });
  }

  /* Tables: sorted by a button in the heading; numbers by their exact value. */
  const key = (cell) => {
    if (cell.dataset.value !== undefined) return Number(cell.dataset.value);
    return cell.textContent.trim();
  };
  const compare = (a, b) => {
    if (typeof a === "number" && typeof b === "number") return b - a;
    if (typeof a === "number") return -1;
    if (typeof b === "number") return 1;
    return a.localeCompare(b, "en", { numeric: true });
  };
  for (const table of all("table[data-sortable]")) {
    const heads = all("thead th", table);
    heads.forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.className = "sort";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const turn = head.getAttribute("aria-sort") === "descending" ? -1 : 1;
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", turn === 1 ? "descending" : "ascending");
        const body = table.tBodies[0];
        const rows = Array.from(body.rows);
        rows.sort((a, b) => turn * compare(key(a.cells[column]), key(b.cells[column])));
        body.append(...rows);
      });
    });
  }
})();
