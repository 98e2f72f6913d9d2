package main

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

var requestSeconds = promauto.NewHistogramVec(prometheus.HistogramOpts{
	Name: "starling_edge_request_seconds", Help: "Requests to the API, by RPC and status; streams count when they end.",
	Buckets: []float64{0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10},
}, []string{"rpc", "status"})

func observe(rpc string, status int, seconds float64) {
	requestSeconds.WithLabelValues(rpc, strconv.Itoa(status)).Observe(seconds)
}

// serveMetrics serves /metrics on a port of its own until ctx ends.
func (e *edge) serveMetrics(ctx context.Context) error {
	if e.config.metricsListen == "" {
		return nil
	}
	promauto.NewGaugeFunc(prometheus.GaugeOpts{Name: "starling_edge_calls", Help: "Calls in flight."},
		func() float64 { return float64(e.calls.Load()) })
	promauto.NewGaugeFunc(prometheus.GaugeOpts{Name: "starling_edge_streams", Help: "Open live streams."},
		func() float64 { return float64(e.streams.Load()) })
	listener, err := net.Listen("tcp", e.config.metricsListen)
	if err != nil {
		return err
	}
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.Handler())
	server := &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second, WriteTimeout: 10 * time.Second}
	context.AfterFunc(ctx, func() { _ = server.Close() })
	go func() {
		if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
			slog.Error("metrics aren't served", "error", err)
		}
	}()
	return nil
}
