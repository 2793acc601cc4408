//! Generates the client and server of the service, without a compiler of `.proto` files.

use tonic_build::manual::{Builder, Method, Service};

fn main() {
    let method = |name: &str, route: &str| {
        Method::builder()
            .name(name)
            .route_name(route)
            .input_type("crate::Message")
            .output_type("crate::Message")
            .codec_path("tonic_prost::ProstCodec")
    };
    let service = Service::builder()
        .name("Compared")
        .package("compared")
        .method(method("echo", "Echo").build())
        .method(method("get", "Get").build())
        .method(method("bulk", "Bulk").client_streaming().build())
        .build();
    Builder::new().compile(&[service]);
}
