package main

import (
	"net/http"
	"strings"
)

const bearerProtocol = "bearer."

func isWebSocket(r *http.Request) bool {
	return strings.EqualFold(r.Header.Get("Upgrade"), "websocket")
}

// subprotocols are those that a WebSocket's client offers.
func subprotocols(r *http.Request) []string {
	var offered []string
	for _, header := range r.Header.Values("Sec-WebSocket-Protocol") {
		for one := range strings.SplitSeq(header, ",") {
			offered = append(offered, strings.TrimSpace(one))
		}
	}
	return offered
}
