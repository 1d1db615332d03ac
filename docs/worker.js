// A browser starts no worker of a file: pages opened from a folder run the search in a hidden frame instead.
if (location.protocol === "file:") {
  window.Worker = class {
    constructor(address) {
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inside = this.frame.contentDocument;
      inside.open();
      inside.write("<body>");
      inside.close();
      inside.defaultView.postMessage = (data) => this.onmessage?.({ data });
      const script = inside.createElement("script");
      script.src = new URL(address, location);
      this.loaded = new Promise((done) => { script.onload = done; });
      inside.body.append(script);
    }
    postMessage(data) { this.loaded.then(() => this.frame.contentWindow.onmessage?.({ data })); }
    terminate() { this.frame.remove(); }
  };
}
