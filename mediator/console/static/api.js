// Shows the admin API's document; requests carry what proves that they come from a page of ours.
const place = document.getElementById("api");
SwaggerUIBundle({
  url: place.dataset.document,
  domNode: place,
  docExpansion: "list",
  validatorUrl: null,
  // Each operation shows its own.
  defaultModelsExpandDepth: -1,
  requestInterceptor: (request) => {
    request.headers["X-CSRF-Token"] = place.dataset.csrf;
    return request;
  },
});

// What Swagger UI leaves without a name, for screen readers.
const names = { "#servers": "Server", ".copy-to-clipboard button": "Copy" };
new MutationObserver(() => {
  for (const [selector, name] of Object.entries(names)) {
    for (const each of place.querySelectorAll(`${selector}:not([aria-label])`)) {
      each.setAttribute("aria-label", name);
    }
  }
}).observe(place, { childList: true, subtree: true });
