// Opened from disk, a page may not start a worker: to a browser each file is a site of its own. The theme searches in
// one, so a hidden frame stands in for it there. (`offline` in mkdocs.yml would fetch such a script from the network,
// were there none by this name.)
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inside = frame.contentWindow;
      const page = this.inside.document;
      page.open(); // or Firefox would replace the page by another empty one, later
      page.close();
      // What a worker posts is for its owner; what a window posts would be for itself.
      this.inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = page.createElement("script");
      script.src = url;
      this.loaded = new Promise(resolve => script.addEventListener("load", resolve));
      page.body.append(script);
    }

    postMessage(data) {
      this.loaded.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
