// Shows the admin API's document; requests carry what proves that they come from a page of ours.
const place = document.getElementById("api");
SwaggerUIBundle({
  url: place.dataset.document,
  domNode: place,
  docExpansion: "list",
  validatorUrl: null,
  requestInterceptor: (request) => {
    request.headers["X-CSRF-Token"] = place.dataset.csrf;
    return request;
  },
});
