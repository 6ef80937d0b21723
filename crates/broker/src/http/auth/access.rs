//! What each route asks for. One that is not listed asks for read-write, so that a new one is never open by mistake.

use axum::http::Method;

use crate::auth::Roles;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Access {
    Public,
    Read,
    Push,
    ReadWrite,
    Admin,
}

/// What changes the server or destroys what many share.
const ADMIN: &[&str] = &["/api/v1/system", "/internal"];
const ADMIN_DELETES: &[&str] = &["/api/v1/consumer-groups", "/api/v1/resources", "/api/v1/queues"];
/// GETs that change nothing. A pop is one that does.
const READS: &[&str] = &[
    "/health",
    "/metrics",
    "/status",
    "/openapi.json",
    "/api/v1/status",
    "/api/v1/analytics",
    "/api/v1/resources",
    "/api/v1/messages",
    "/api/v1/consumer-groups",
    "/api/v1/dlq",
    "/api/v1/traces",
    "/api/v1/kv",
    "/api/v1/timers",
    "/api/v1/ephemeral/queues",
];
const PUSHES: &[&str] = &["/api/v1/push", "/api/v1/timers", "/api/v1/ephemeral/push"];

/// `route` is the path as the router knows it, with names in braces for what a request fills in.
pub(super) fn access(method: &Method, route: &str) -> Access {
    let is_under = |prefixes: &[&str]| {
        prefixes
            .iter()
            .any(|prefix| route.strip_prefix(prefix).is_some_and(|rest| rest.is_empty() || rest.starts_with('/')))
    };
    let is_get = *method == Method::GET || *method == Method::HEAD;
    if is_under(&["/auth"]) {
        Access::Public
    } else if is_under(ADMIN)
        || *method == Method::DELETE && is_under(ADMIN_DELETES)
        || *method == Method::POST && route == "/api/v1/stats/refresh"
    {
        Access::Admin
    } else if is_get && is_under(READS) || *method == Method::POST && route == "/streams/v1/state/get" {
        Access::Read
    } else if *method == Method::POST && PUSHES.contains(&route) {
        Access::Push
    } else {
        Access::ReadWrite
    }
}

/// The roles that open a route, by their usual names; none if it is public.
pub(in crate::http) fn roles(method: &Method, route: &str) -> Vec<&'static str> {
    let access = access(method, route);
    let none = Roles::default();
    let named = [
        ("admin", Roles { admin: true, ..none }),
        ("read-write", Roles { read_write: true, ..none }),
        ("read-only", Roles { read_only: true, ..none }),
        ("write-only", Roles { write_only: true, ..none }),
    ];
    let opening = named.into_iter().filter(|(_, roles)| access != Access::Public && access.is_open_to(*roles));
    opening.map(|(name, _)| name).collect()
}

impl Access {
    pub(super) fn is_open_to(self, roles: Roles) -> bool {
        let Roles { admin, read_write, read_only, write_only } = roles;
        match self {
            Self::Public => true,
            Self::Read => admin || read_write || read_only,
            Self::Push => admin || read_write || write_only,
            Self::ReadWrite => admin || read_write,
            Self::Admin => admin,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_route_asks_for_what_it_does() {
        for (method, route, expected) in [
            (Method::GET, "/health", Access::Read),
            (Method::GET, "/metrics/prometheus", Access::Read),
            (Method::GET, "/auth/login", Access::Public),
            (Method::POST, "/api/v1/push", Access::Push),
            (Method::POST, "/api/v1/timers", Access::Push),
            (Method::POST, "/api/v1/ephemeral/push", Access::Push),
            (Method::DELETE, "/api/v1/timers/{queue}/{*key}", Access::ReadWrite),
            (Method::GET, "/api/v1/timers/{queue}/{*key}", Access::Read),
            (Method::GET, "/api/v1/pop", Access::ReadWrite),
            (Method::HEAD, "/api/v1/pop/queue/{queue}", Access::ReadWrite),
            (Method::GET, "/api/v1/ephemeral/pop", Access::ReadWrite),
            (Method::GET, "/api/v1/ephemeral/queues/{queue}/depth", Access::Read),
            (Method::GET, "/api/v1/messages/{partition_id}/{*transaction_id}", Access::Read),
            (Method::HEAD, "/api/v1/messages", Access::Read),
            (Method::POST, "/api/v1/messages/{partition_id}/{*transaction_id}", Access::ReadWrite),
            (Method::DELETE, "/api/v1/messages/{partition_id}/{*transaction_id}", Access::ReadWrite),
            (Method::POST, "/api/v1/traces", Access::ReadWrite),
            (Method::GET, "/api/v1/traces/names", Access::Read),
            (Method::GET, "/api/v1/dlq", Access::Read),
            (Method::POST, "/api/v1/dlq/replay", Access::ReadWrite),
            (Method::POST, "/api/v1/kv", Access::ReadWrite),
            (Method::GET, "/api/v1/kv/{namespace}/{*key}", Access::Read),
            (Method::POST, "/streams/v1/state/get", Access::Read),
            (Method::POST, "/streams/v1/cycle", Access::ReadWrite),
            (Method::GET, "/streams/v1/state/get", Access::ReadWrite),
            (Method::POST, "/api/v1/configure", Access::ReadWrite),
            (Method::POST, "/api/v1/consumer-groups/{group}/subscription", Access::ReadWrite),
            (Method::DELETE, "/api/v1/consumer-groups/{group}", Access::Admin),
            (Method::DELETE, "/api/v1/resources/queues/{queue}", Access::Admin),
            (Method::DELETE, "/api/v1/queues/{queue}/clear", Access::Admin),
            (Method::POST, "/api/v1/stats/refresh", Access::Admin),
            (Method::GET, "/api/v1/system/maintenance", Access::Admin),
            (Method::POST, "/internal/api/notify", Access::Admin),
            (Method::GET, "/api/v1/resourceful", Access::ReadWrite),
            (Method::GET, "/api/v1/anything/new", Access::ReadWrite),
        ] {
            assert_eq!(access(&method, route), expected, "{method} {route}");
        }
    }

    #[test]
    fn a_role_opens_what_it_says_and_no_more() {
        let none = Roles::default();
        for (roles, open) in [
            (none, [false; 4]),
            (Roles { read_only: true, ..none }, [true, false, false, false]),
            (Roles { write_only: true, ..none }, [false, true, false, false]),
            (Roles { read_only: true, write_only: true, ..none }, [true, true, false, false]),
            (Roles { read_write: true, ..none }, [true, true, true, false]),
            (Roles { admin: true, ..none }, [true; 4]),
        ] {
            let found =
                [Access::Read, Access::Push, Access::ReadWrite, Access::Admin].map(|access| access.is_open_to(roles));
            assert_eq!(found, open, "{roles:?}");
        }
    }
}
