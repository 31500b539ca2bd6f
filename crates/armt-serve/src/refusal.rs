//! What a client hears when something is not done: a status and `{"error": {"type", "message", "param"}}`.

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::json;

/// Something that is not done, and why.
#[derive(Clone, Debug)]
pub struct Refusal {
    status: StatusCode,
    message: String,
    param: Option<&'static str>,
}

/// What a handler gives.
pub type Reply<T> = Result<T, Refusal>;

/// When a client may come again, in seconds.
const RETRY_AFTER: HeaderValue = HeaderValue::from_static("1");

impl Refusal {
    fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Refusal { status, message: message.into(), param: None }
    }

    /// A field that cannot be taken.
    pub fn field(param: &'static str, message: impl Into<String>) -> Self {
        Refusal { param: Some(param), ..Self::invalid(message) }
    }

    /// A request that cannot be understood.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message)
    }

    /// A key is missing, or is none of ours.
    pub fn unknown_key() -> Self {
        Self::new(StatusCode::UNAUTHORIZED, "expected `Authorization: Bearer` and a key of this server")
    }

    /// There is such a path, but not to be used so.
    pub fn method() -> Self {
        Self::new(StatusCode::METHOD_NOT_ALLOWED, "this path does not have that method (/openapi.json has all)")
    }

    /// A page of another place asks, or a name that is not this server's.
    pub fn foreign(message: impl Into<String>) -> Self {
        Self::new(StatusCode::FORBIDDEN, message)
    }

    /// There is no such thing, or it is somebody else's.
    pub fn missing(what: &str) -> Self {
        Self::new(StatusCode::NOT_FOUND, format!("there is no such {what}"))
    }

    /// It does not go together with what there is.
    pub fn conflict(message: impl Into<String>) -> Self {
        Self::new(StatusCode::CONFLICT, message)
    }

    /// Nothing came for too long.
    pub fn silence() -> Self {
        Self::new(StatusCode::REQUEST_TIMEOUT, "nothing came for too long")
    }

    /// A body without a length where one is needed.
    pub fn length_required() -> Self {
        Self::new(StatusCode::LENGTH_REQUIRED, "expected a Content-Length")
    }

    /// Larger than is taken.
    pub fn too_large(most: u64) -> Self {
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, format!("expected at most {most} bytes"))
    }

    /// A field that is larger than is taken.
    pub fn too_long(param: &'static str, message: impl Into<String>) -> Self {
        Refusal { param: Some(param), ..Self::new(StatusCode::PAYLOAD_TOO_LARGE, message) }
    }

    /// In a form that is not read.
    pub fn form(message: impl Into<String>) -> Self {
        Self::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message)
    }

    /// More at a time than is done.
    pub fn too_many(what: &str, most: usize) -> Self {
        Self::new(StatusCode::TOO_MANY_REQUESTS, format!("there are {most} {what} already"))
    }

    /// Not now.
    pub fn unavailable(message: impl Into<String>) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, message)
    }

    /// A failure of ours.
    pub fn failure(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, message)
    }

    fn kind(&self) -> &'static str {
        match self.status {
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::FORBIDDEN => "permission_error",
            StatusCode::NOT_FOUND => "not_found_error",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            status if status.is_server_error() => "server_error",
            _ => "invalid_request_error",
        }
    }

    /// As an event of a stream has it.
    pub fn body(&self) -> serde_json::Value {
        json!({ "error": { "type": self.kind(), "message": self.message, "param": self.param } })
    }
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.message)
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.body())).into_response();
        if matches!(self.status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE) {
            response.headers_mut().insert(header::RETRY_AFTER, RETRY_AFTER);
        }
        if self.status == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

/// What the library refuses was asked for wrongly, but for its own failures.
impl From<armt::Error> for Refusal {
    fn from(error: armt::Error) -> Self {
        match error {
            armt::Error::Io { .. } | armt::Error::System { .. } | armt::Error::Engine(_) => Self::failure(error.to_string()),
            _ => Self::invalid(error.to_string()),
        }
    }
}
